"""Prefetch: the first half of a restore, while there is no object yet to restore into.

It resolves, takes the lease and reads stored bytes into host memory, in threads. It decides nothing: the restore
chooses the checkpoint by itself, and takes from the prefetch what fits. It needs neither torch nor a process group.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping

from ckpt.config import Config
from ckpt.restoring.attached import SaverMemory, attach
from ckpt.restoring.resolve import candidates, release_lease, take_lease, wait_for_orphan_saver
from ckpt.saver.host_memory import available_bytes
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.names import Reference
from ckptstore.reading.ahead import ReadAhead, likely_reads
from ckptstore.reading.source import Source, check_manifest_data

logger = logging.getLogger(__name__)

_MEMORY_SHARE = 4
"""By default 1/N of the memory that is available to this rank."""


class Prefetch:
    """What is on its way to host memory. Methods may be called from any thread."""

    def __init__(
        self, source: Source, config: Config, reference: Reference, place: tuple[int, int], max_bytes: int | None
    ) -> None:
        """Begin; returns at once. place: this rank, and the number of ranks. Raises InvalidRequest."""
        if max_bytes is not None and max_bytes < 0:
            raise InvalidRequest(f"max_bytes {max_bytes} is negative", "Give bytes, or leave it out")
        self._source = source
        self._config = config
        self._reference = reference
        self._rank, self._size = place
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._closed = False
        self._checkpoint: Checkpoint | None = None
        self._lease: str | None = None
        self._manifest = b""
        self.memory: SaverMemory | None = None
        """Memory of this host that holds the checkpoint: what is there is not read."""
        self._ahead: ReadAhead | None = None
        self._thread = threading.Thread(target=self._begin, name="ckpt-prefetch", daemon=True)
        self._thread.start()

    def wait(self) -> int:
        """Return when everything is read, or cannot be read. The number of stored bytes that are in host memory."""
        self._thread.join()
        ahead = self._ahead
        return ahead.wait() if ahead is not None else 0

    def of(self, checkpoint: Checkpoint) -> Prefetch | None:
        """Itself if it is of this checkpoint; otherwise None, and its memory and its lease are released.

        A checkpoint known to be corrupt is not prefetched: the restore will try another one.
        """
        if checkpoint.state is State.CORRUPT:
            return None
        self._thread.join()
        found = self._checkpoint
        if found is not None and (found.run, found.attempt) == (checkpoint.run, checkpoint.attempt):
            return self
        self.close()
        return None

    def manifest_data(self) -> bytes:
        """The stored manifest, unchecked; empty if it was not read."""
        return self._manifest

    def shards(self) -> ReadAhead | None:
        """The shards, partly in memory; None if nothing was read."""
        return self._ahead

    def hand_over_lease(self) -> str | None:
        """The lease, if there is one; the caller releases it."""
        with self._lock:
            lease, self._lease = self._lease, None
            return lease

    def close(self) -> None:
        """Begin no more reads; release the memory, and the lease if it was not handed over."""
        with self._lock:
            self._closed = True
            self.memory = None
            ahead, self._ahead = self._ahead, None
            lease, self._lease = self._lease, None
        if ahead is not None:
            ahead.close()
        self._release(lease)

    def _begin(self) -> None:
        try:
            wait_for_orphan_saver(self._config)
            checkpoint = next(self._candidates(), None)
            if checkpoint is not None and not self._closed:
                self._protect(checkpoint)
                self._read(checkpoint)
        except CkptError as error:
            logger.warning("nothing is read ahead, the restore will read all: %s", error)

    def _candidates(self) -> Iterator[Checkpoint]:
        """As a restore finds them; only one rank commits what is complete."""
        if self._rank == 0:
            found = candidates(self._source, self._config, self._reference)
        elif self._reference.step is not None:
            found = iter([self._source.find(self._reference)])
        else:
            found = self._source.candidates(self._reference.run)
        return (checkpoint for checkpoint in found if checkpoint.state is not State.CORRUPT)

    def _protect(self, checkpoint: Checkpoint) -> None:
        lease = take_lease(self._source, checkpoint) if self._rank == 0 else None
        with self._lock:
            self._checkpoint = checkpoint
            if not self._closed:
                self._lease, lease = lease, None
        self._release(lease)

    def _release(self, lease: str | None) -> None:
        if lease is not None and self._checkpoint is not None:
            release_lease(self._source, self._checkpoint.run, lease)

    def _read(self, checkpoint: Checkpoint) -> None:
        data = self._source.manifest_data(checkpoint)
        content = check_manifest_data(checkpoint, data).content
        max_bytes = self._max_bytes if self._max_bytes is not None else (available_bytes() or 0) // _MEMORY_SHARE
        memory = attach(self._config.store, checkpoint) if self._config.store is not None else None
        reads = likely_reads(content, self._rank, self._size, max_bytes)
        if memory is not None:
            reads = memory.without(reads)
        logger.info("reads %s of %s ahead", human.size(sum(read.bytes for read in reads)), checkpoint.id)
        with self._lock:
            self._manifest = data
            self.memory = memory if not self._closed else None
            if reads and not self._closed:
                self._ahead = ReadAhead(self._source, checkpoint, reads)


def likely_place(world: tuple[int, int], solo: bool, environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Rank and number of ranks of the restore to come. Pure.

    world: those of the process group, or (0, 1) while there is none: then those that the environment names.
    """
    named = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if world[1] > 1 or solo or not all(number.isdecimal() for number in named):
        return world
    rank, size = map(int, named)
    return (rank, size) if rank < size else world
