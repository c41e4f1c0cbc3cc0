"""A local tier on hosts that share nothing: each shard on its own host and on others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.hosts.bed import Bed
from tests.hosts.conftest import Site
from tests.hosts.services import start_s3
from tests.hosts.test_jobs import Lines, check_continued, job
from tests.support.jobs import Job

pytestmark = pytest.mark.slow

TIER = "file:///mnt/ckpts"


@pytest.fixture(scope="module")
def four(namespaces: None) -> Iterator[Site]:
    with Bed(["a", "b", "c", "d", "s3"], mbit=1000, clocks={"b": 600.0}) as bed:
        yield Site(bed, start_s3(bed["s3"]), "")


def tiered(site: Site, hosts: str, run: str, replicas: int = 1, ranks: int = 0, **options: Any) -> Job:
    settings = {"local": TIER, "replicas": replicas, **options.pop("settings", {})}
    return job(site, hosts, ranks or len(hosts.split()), run, settings=settings, **options)


def read(lines: Lines) -> dict[str, int]:
    """Bytes that all ranks read, by where."""
    found = [list(map(int, words[2:])) for words in lines if words[0] == "read"]
    assert found
    return dict(zip(("memory", "store", "local", "peer"), map(sum, zip(*found, strict=True)), strict=True))


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_host_that_is_lost_with_its_disk_is_restored_from_its_neighbours(layout: str, four: Site) -> None:
    run = f"lost-{layout}"
    with tiered(four, "a b c d", run, layout=layout, settings={"replicate_every": 1000}) as running:
        first = running.until(10, 4)
        print(running.errors())
        four.bed.kill("b")
    four.bed.start("b", empty=True)
    with tiered(four, "a b c d", run, layout=layout, steps=12) as running:
        second = running.finish()
        print(running.errors())
    check_continued(first, second, 8)
    print(read(second))
    assert read(second)["store"] == 0
