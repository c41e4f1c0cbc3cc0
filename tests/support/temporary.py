"""A folder for temporary files that one session of tests in an environment of its own has alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Notes of this host about runs (ckpt.host.lock) go there: another session may use the same folders again. A
    TensorFlow that is killed leaves the functions that it generated there."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", name)
        patch.setattr(tempfile, "tempdir", None)
        yield
