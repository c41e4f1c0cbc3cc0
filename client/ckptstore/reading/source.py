"""Sources of checkpoints: one interface for a store and for a daemon that serves a store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from itertools import chain, islice
from typing import Protocol

from msgspec.structs import replace

from ckptstore.clock import Clock, system_clock
from ckptstore.commits import catalog, labels, leases
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.generations import read_generation
from ckptstore.commits.labels import with_labels
from ckptstore.errors import CkptError, CorruptObject, InvalidRequest, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import JSON, Manifest, Receipt, digest
from ckptstore.format.merging import without_optimizer
from ckptstore.format.parsing import parse_local, parse_manifest, parse_sealed
from ckptstore.format.statistics import SideDocument
from ckptstore.names import STORE_ID, Reference, RunKeys, new_ulid, shard_name
from ckptstore.run import Run
from ckptstore.stores import ObjectReader, Store
from ckptstore.threads import in_parallel

MOST_NAMED = 20
"""Maximum number of runs that an error lists."""


class ShardSource(Protocol):
    """A reader of chunks. Every method may be called from any thread."""

    parallel_reads: int
    """Number of concurrent range reads that is fastest."""
    longest_read: int
    """Largest useful size of one range read, in bytes; 0: no preference."""

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """Open a reader of the stored bytes of a shard, which are not checked."""


class Source(ShardSource, Protocol):
    """The methods that a reader needs. Every method may be called from any thread."""

    url: str

    def runs(self) -> list[str]:
        """Names of the runs."""

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """All checkpoints of a run, newest step first."""

    def candidates(self, run: str) -> Iterator[Checkpoint]:
        """Checkpoints for a restore to try, newest step first, read lazily. Corrupt ones are included for reports."""

    def latest(self, run: str | None = None) -> Checkpoint:
        """The newest checkpoint of a run. Raises NoCheckpoint.

        run: may be None if only one run has checkpoints; otherwise InvalidRequest lists them.
        """

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint of a reference. Raises NoCheckpoint."""

    def manifest_data(self, checkpoint: Checkpoint) -> bytes:
        """The stored manifest, unchecked."""

    def receipt_data(self, checkpoint: Checkpoint, rank: int) -> bytes:
        """The stored receipt of a rank, unchecked."""

    def statistics_data(self, checkpoint: Checkpoint, rank: int, side: SideDocument) -> bytes:
        """The stored statistics of a rank, unchecked. side: names them. Raises CorruptObject or ObjectMissing."""

    def take_lease(self, checkpoint: Checkpoint, holder: str, ttl_s: float) -> str:
        """Protect a checkpoint from deletion for `ttl_s` seconds; returns the id of the lease. Raises NoCheckpoint."""

    def release_lease(self, run: str, lease: str) -> None:
        """End a lease. Idempotent."""

    def close(self) -> None:
        """Close all connections; the source must not be used afterwards."""


class StoreSource:
    """Reads directly from the store."""

    def __init__(self, store: Store, clock: Clock = system_clock) -> None:
        self.store = store
        self.url = store.url
        self.parallel_reads = store.parallel_reads
        self.longest_read = store.longest_read
        self._clock = clock

    def id(self) -> str:
        """The id of the store, equal for all processes that see the same objects: a ULID that the first caller
        creates. Raises Unavailable."""
        self.store.put_if_absent(STORE_ID, new_ulid(self._clock()).encode())
        return self.store.get(STORE_ID).decode(errors="replace")

    def runs(self) -> list[str]:
        """Folders of the store whose name is a valid run name."""
        return catalog.list_runs(self.store)

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """Reads all outcomes of the run."""
        named = self.run(run)
        return with_labels(named, catalog.list_checkpoints(named))

    def candidates(self, run: str) -> Iterator[Checkpoint]:
        """Reads outcomes, newest step first."""
        return catalog.candidates(self.run(run))

    def latest(self, run: str | None = None) -> Checkpoint:
        """Reads outcomes of one run or of every run, newest step first."""
        if run is not None:
            return self._labelled(catalog.latest(self.run(run)))
        newest = chain.from_iterable(islice(catalog.newest_first(self.run(name)), 1) for name in self.runs())
        return self._labelled(only_run(list(newest), self.url))

    def find(self, reference: Reference) -> Checkpoint:
        """Reads outcomes: newest step first, only the one that is named, or all of the run for a tag or a metric."""
        found = labels.find(self.run(reference.run), reference)
        return catalog.with_parents([found], partial(read_generation, self.run(found.run)))[0]

    def manifest_data(self, checkpoint: Checkpoint) -> bytes:
        """One read."""
        return self.store.get(RunKeys(checkpoint.run).manifest(checkpoint.attempt))

    def receipt_data(self, checkpoint: Checkpoint, rank: int) -> bytes:
        """One read."""
        return self.store.get(RunKeys(checkpoint.run).receipt(checkpoint.attempt, rank))

    def statistics_data(self, checkpoint: Checkpoint, rank: int, side: SideDocument) -> bytes:
        """One read."""
        if side.offset is None:
            return self.store.get(RunKeys(checkpoint.run).statistics(checkpoint.attempt, rank))
        with self.open_shard(checkpoint, shard_name(rank)) as shard:
            return bytes(shard.read_once(side.offset, side.bytes))

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """A reader of the store."""
        return self.store.open_reader(RunKeys(checkpoint.run).shard(checkpoint.attempt, shard))

    def take_lease(self, checkpoint: Checkpoint, holder: str, ttl_s: float) -> str:
        """Writes a lease object, then lists tombstones."""
        return leases.take_lease(self.run(checkpoint.run), checkpoint.attempt, holder, ttl_s, checkpoint.thinned)

    def release_lease(self, run: str, lease: str) -> None:
        """Deletes the lease object."""
        leases.release_lease(self.run(run), lease)

    def run(self, name: str) -> Run:
        """One run of the store."""
        return Run(self.store, name, self._clock)

    def _labelled(self, checkpoint: Checkpoint) -> Checkpoint:
        return with_labels(self.run(checkpoint.run), [checkpoint])[0]

    def close(self) -> None:
        """A store holds no connections of its own: fsspec shares them within the process."""


def suggest_run(error: NoCheckpoint, source: Source) -> None:
    """Name a run of a similar name in the hint, if the run of the error has none. Reads the names of runs."""
    if missing := re.search("run (?:matching )?'(.+?)'", error.message):
        with suppress(CkptError):
            for similar in {*get_close_matches(missing[1], source.runs(), 1)} - {missing[1]}:
                error.hint = f"Did you mean run {similar!r}? {error.hint}"


def only_run(newest: Sequence[Checkpoint], url: str) -> Checkpoint:
    """The newest checkpoint where no run is named, given the newest ones of all runs, or of more than MOST_NAMED.

    Raises NoCheckpoint if there is none, InvalidRequest if there are several.
    """
    if not newest:
        raise NoCheckpoint(f"no run has a checkpoint in {url}", "Check the URL of the store")
    if len(newest) > 1:
        names = [checkpoint.run for checkpoint in newest[:MOST_NAMED]]
        more = ", and more" if len(newest) > MOST_NAMED else ""
        raise InvalidRequest(
            f"no run is named, and {url} has several: {', '.join(names)}{more}",
            "Name the run: each has a latest checkpoint",
        )
    return newest[0]


def read_manifest(source: Source, checkpoint: Checkpoint) -> Manifest:
    """The checked manifest of a checkpoint. Raises Damaged, ObjectMissing or Unavailable."""
    return check_manifest_data(checkpoint, source.manifest_data(checkpoint))


def check_manifest_data(checkpoint: Checkpoint, data: bytes) -> Manifest:
    """The manifest in `data`, checked to belong to the checkpoint; without optimizer state if it is thinned.

    Raises Damaged.
    """
    key = f"{checkpoint.id}/manifest.json.zst"
    manifest = parse_manifest(data, key, expected=checkpoint.manifest_digest)
    if (manifest.run, manifest.attempt) != (checkpoint.run, str(checkpoint.attempt)):
        raise CorruptObject(f"{key} is the manifest of another attempt")
    return replace(manifest, content=without_optimizer(manifest.content)) if checkpoint.thinned else manifest


def read_receipt(source: Source, checkpoint: Checkpoint, manifest: Manifest, rank: int) -> Receipt:
    """The checked receipt of a rank. Raises Damaged, ObjectMissing or Unavailable."""
    data, key = receipt_data(source, checkpoint, manifest, rank)
    return parse_sealed(data, Receipt, key)


def read_local(source: Source, checkpoint: Checkpoint, manifest: Manifest, rank: int) -> dict[str, JSON]:
    """The rank-local state in the receipt of a rank. Raises Damaged, ObjectMissing or Unavailable."""
    return parse_local(*receipt_data(source, checkpoint, manifest, rank))


def read_all_local(source: Source, checkpoint: Checkpoint, manifest: Manifest) -> list[dict[str, JSON]]:
    """The rank-local state of all ranks, read concurrently."""
    return in_parallel(partial(read_local, source, checkpoint, manifest), range(manifest.world_size))


def receipt_data(source: Source, checkpoint: Checkpoint, manifest: Manifest, rank: int) -> tuple[bytes, str]:
    """The stored receipt of a rank, and its name for messages. Raises CorruptObject, ObjectMissing or Unavailable."""
    key = f"{checkpoint.id}/receipt of rank {rank}"
    data = source.receipt_data(checkpoint, rank)
    if digest(data) != manifest.receipts[rank].digest:
        raise CorruptObject(f"{key} does not match the checksum in its manifest")
    return data, key


def stored_statistics(source: Source, checkpoint: Checkpoint, rank: int, side: SideDocument | None) -> bytes:
    """The document with the statistics of a rank; empty if there are none, or they are missing or damaged. side: what
    the manifest says about them. Raises Unavailable."""
    try:
        return checked_statistics(source, checkpoint, rank, side) if side is not None else b""
    except (ObjectMissing, CorruptObject):
        return b""


def statistics_name(checkpoint: Checkpoint, rank: int) -> str:
    """The name of the statistics of a rank, for messages."""
    return f"{checkpoint.id}/statistics of rank {rank}"


def checked_statistics(source: Source, checkpoint: Checkpoint, rank: int, side: SideDocument) -> bytes:
    """The document with the statistics of a rank. Raises CorruptObject, ObjectMissing or Unavailable."""
    data = source.statistics_data(checkpoint, rank, side)
    if digest(data) != side.digest:
        raise CorruptObject(f"{statistics_name(checkpoint, rank)} do not match the checksum in the manifest")
    return data
