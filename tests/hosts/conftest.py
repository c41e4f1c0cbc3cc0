"""Two hosts that train, and one each for the object store and for the daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest

from tests.hosts.bed import Bed
from tests.hosts.machine import refusal
from tests.hosts.services import start_daemon, start_s3

CLOCKS = {"a": -300.0, "b": 600.0, "desk": -900.0}
"""Seconds by which the wall clocks of some hosts are ahead of the others'."""


@dataclass
class Site:
    """The hosts of the tests, and what runs there."""

    bed: Bed
    environment: Mapping[str, str]
    """Of programs that reach the object store."""
    daemon: str
    """The URL of ckptd."""


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where this kernel, or user, has no hosts."""
    if (reason := refusal()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def site(namespaces: None) -> Iterator[Site]:
    """Not for the session: its daemon asks the object store each second, and would to the end of all tests."""
    with Bed(["a", "b", "spare", "s3", "desk"], mbit=1000, clocks=CLOCKS) as bed:
        environment = start_s3(bed["s3"])
        yield Site(bed, environment, start_daemon(bed["desk"], environment))
