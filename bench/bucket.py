"""A bucket to measure with: SeaweedFS on this machine. It shares the cores with its clients, so only ratios count."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bench.measuring import Spread, descendants, processor_seconds, usage
from bench.peers.s3 import Bucket, RawObstore
from bench.report import Goal
from bench.state import State
from ckptstore import names
from ckptstore.commits.catalog import Checkpoint
from ckptstore.names import RunKeys
from ckptstore.stores import Store, open_store
from tests.support import seaweed
from tests.support.seaweed import S3Service

VOLUME_MB = 1000
_T = TypeVar("_T")
CONCURRENCIES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Timed:
    """Cost of a call."""

    wall_s: float
    client_core_s: float
    """Processor seconds of this process and its descendants, without the server."""
    server_core_s: float


@dataclass(frozen=True, slots=True)
class Service:
    """A running service with one bucket."""

    s3: S3Service
    process: int

    @property
    def bucket(self) -> Bucket:
        """For peers."""
        return Bucket(self.s3.endpoint, seaweed.BUCKET, seaweed.ACCESS_KEY, seaweed.SECRET_KEY)

    @property
    def raw(self) -> RawObstore:
        """obstore's client."""
        return RawObstore(self.bucket)

    @property
    def options(self) -> dict[str, Any]:
        """For fsspec."""
        return self.s3.options

    def url(self, folder: str) -> str:
        """URL of a folder in the bucket."""
        return f"s3://{seaweed.BUCKET}/{folder}"

    def store(self, folder: str) -> Store:
        """A folder in the bucket."""
        return open_store(self.url(folder), self.options)

    def timed(self, call: Callable[[], object]) -> Timed:
        """Measure a call."""
        before = processor_seconds(self.process)
        with usage() as used:
            call()
        server = processor_seconds(self.process) - before
        return Timed(used.wall_s, used.core_s - server, server)

    def clear(self, folder: str) -> None:
        """Delete all objects of a folder, and free the disk."""
        store = self.store(folder)
        store.delete_many([info.key for info in store.list("")])
        seaweed.free_deleted(self.s3)


@contextmanager
def running_bucket() -> Iterator[Service]:
    """In a folder of the default temporary file system; gone on exit."""
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-") as folder:
        before = set(descendants())
        with seaweed.running_service(Path(folder), VOLUME_MB) as s3:
            (server,) = (each for each in set(descendants()) - before if _name(each) == "weed")
            yield Service(s3, server)


def _name(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text().strip()


def shard_of(checkpoint: Checkpoint) -> str:
    """Key of the checkpoint's only shard."""
    return RunKeys(checkpoint.run).shard(checkpoint.attempt, names.shard_name(0))


def read_shard(store: Store, checkpoint: Checkpoint) -> memoryview:
    """Bytes of the checkpoint's only shard."""
    key = shard_of(checkpoint)
    shard = memoryview(bytearray(store.size(key)))
    store.get_range(key, 0, shard)
    return shard


def key_of(peer: str) -> str:
    """Folder of a peer's state. SeaweedFS rejects an object at the path of a former folder, which some peers create."""
    return f"peers/{peer.replace(', ', '-').replace(' ', '-')}"


def check_restored(state: State, restore: Callable[[], _T]) -> _T:
    """Restore all numbers of the state, and compare every bit."""
    before = state.digest()
    state.forget()
    result = restore()
    if state.digest() != before:
        raise RuntimeError("the restored state differs from the saved one")
    return result


def fastest(request: Callable[[_T], object], ways: Sequence[_T], service: Service) -> _T:
    """The fastest way to send requests; each is measured twice, in turns."""
    spent = [service.timed(lambda way=way: request(way)).wall_s for _ in range(2) for way in ways]  # type: ignore[misc]
    return ways[spent.index(min(spent)) % len(ways)]


def row(name: str, timed: Sequence[Timed], num_bytes: int, note: str = "") -> tuple[str, ...]:
    """Columns of the table: seconds, MB/s, processor seconds of client and server per GB."""
    wall = Spread.of([one.wall_s for one in timed])
    client, server = (
        Spread.of([getattr(one, which) for one in timed]).median / num_bytes * 1e9
        for which in ("client_core_s", "server_core_s")
    )
    return name, str(wall), f"{num_bytes / wall.median / 1e6:.0f}", f"{client:.2f}", f"{server:.2f}", note


COLUMNS = ("", "seconds", "MB/s", "client core-s/GB", "server core-s/GB", "")


def median_s(timed: Sequence[Timed]) -> float:
    """By the clock."""
    return Spread.of([one.wall_s for one in timed]).median


def goal(name: str, vs: str, limit: Sequence[Timed], ours: Sequence[Timed], at_least: float) -> Goal:
    """The limit's median seconds over ours."""
    return Goal(name, vs, median_s(limit) / median_s(ours), at_least, "at least")
