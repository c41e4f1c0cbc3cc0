"""Reading ahead: what a rank will need is planned, read into memory within a bound, and taken from there."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import StoreUnavailable
from ckptstore.format.documents import Chunks, Content, Entries, Shard, Slices
from ckptstore.format.planning import entry_bytes, plan_reads, whole_entries
from ckptstore.names import shard_name
from ckptstore.reading.ahead import ReadAhead, likely_reads
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.counting import CountingStore
from tests.support.waiting import wait_until

ALL = 1 << 62
MB = 1 << 20


def content_of(sizes: list[list[int]]) -> Content:
    """Shards whose chunks have these stored sizes."""
    nothing = np.zeros(0, np.int64)
    shards = []
    for rank, stored in enumerate(sizes):
        column, zeros = np.array(stored, np.int64), np.zeros(len(stored), np.int64)
        chunks = Chunks(raw=column, stored=column, codec=zeros, codecs=["raw"], digest=b"\0" * 16 * len(stored))
        shards.append(Shard(name=shard_name(rank), rank=rank, chunks=chunks))
    slices = Slices(entry=nothing, shard=nothing, at=nothing, box=nothing)
    return Content(shards=shards, entries=Entries(name=[], dtype=[], shape=[]), slices=slices, aliases={}, trees={})


def planned(content: Content, rank: int, size: int, max_bytes: int = ALL) -> list[tuple[str, int]]:
    return [
        (chunk.shard, chunk.index) for read in likely_reads(content, rank, size, max_bytes) for chunk in read.chunks
    ]


@given(st.lists(st.lists(st.integers(1, 20 * MB), min_size=1, max_size=9), max_size=4), st.integers(1, 9))
def test_the_ranks_together_read_each_chunk_once(sizes: list[list[int]], size: int) -> None:
    content = content_of(sizes)
    found = Counter(chunk for rank in range(size) for chunk in planned(content, rank, size))
    assert found == Counter((shard_name(i), j) for i, stored in enumerate(sizes) for j in range(len(stored)))


@given(st.lists(st.integers(1, 20 * MB), min_size=1, max_size=20), st.integers(0, 300 * MB))
def test_no_more_than_the_bound_is_read(stored: list[int], max_bytes: int) -> None:
    reads = likely_reads(content_of([stored]), 0, 1, max_bytes)
    assert sum(read.bytes for read in reads) <= max_bytes
    assert len(planned(content_of([stored]), 0, 1, sum(stored))) == len(stored)


def test_a_sharded_rank_reads_its_shard_and_replicas_divide_theirs() -> None:
    two = content_of([[MB] * 8, [MB] * 8])
    assert {shard for shard, _ in planned(two, 1, 2)} == {shard_name(1)}
    # Two replicas of two shards: ranks 1 and 3 hold the second one.
    assert planned(two, 1, 4) == [(shard_name(1), index) for index in range(4)]
    assert planned(two, 3, 4) == [(shard_name(1), index) for index in range(4, 8)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Forty megabytes, stored as they are, so that several reads are planned."""
    rng = np.random.default_rng(0)
    arrays = {f"model/{i}": rng.integers(0, 1 << 62, MB * 5 // 8) for i in range(8)}
    return write_checkpoint(open_store(str(tmp_path / "store")), arrays=arrays)


def counting_store(tmp_path: Path) -> CountingStore:
    return CountingStore(open_store(str(tmp_path / "store")))


def load(store: Store, checkpoint: Checkpoint, ahead: ReadAhead | None = None) -> dict[str, bytes]:
    """All entries, through what was read ahead."""
    content = read_manifest(StoreSource(store), checkpoint).content
    buffers = {name: bytearray(size) for name, size in entry_bytes(content).items()}
    reads = plan_reads(content, whole_entries(content.entries.name))
    views = {name: memoryview(buffer) for name, buffer in buffers.items()}
    fetch(ahead or StoreSource(store), checkpoint, reads, views, threads=len(reads))
    return {name: bytes(buffer) for name, buffer in buffers.items()}


def begin(store: Store, checkpoint: Checkpoint, max_bytes: int = ALL) -> ReadAhead:
    content = read_manifest(StoreSource(store), checkpoint).content
    return ReadAhead(StoreSource(store), checkpoint, likely_reads(content, 0, 1, max_bytes))


def test_what_was_read_ahead_is_not_read_again_and_then_forgotten(checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = counting_store(tmp_path)
    ahead = begin(store, checkpoint)
    assert ahead.wait() == checkpoint.stored_bytes == store.read_bytes
    assert load(store, checkpoint, ahead) == load(open_store(str(tmp_path / "store")), checkpoint)
    assert store.read_bytes == checkpoint.stored_bytes
    assert ahead.wait() == 0


def test_what_is_beyond_the_bound_is_read_when_it_is_needed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = counting_store(tmp_path)
    ahead = begin(store, checkpoint, checkpoint.stored_bytes // 2)
    assert 0 < ahead.wait() <= checkpoint.stored_bytes // 2
    assert load(store, checkpoint, ahead) == load(open_store(str(tmp_path / "store")), checkpoint)
    assert store.read_bytes == checkpoint.stored_bytes


class FlippingStore(CountingStore):
    """Flips the first bit of the shard when it is read for the first time."""

    flipped = False

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        count = super().read_into(key, offset, buffer)
        if offset == 0 and not self.flipped:
            self.flipped = True
            buffer[0] ^= 1
        return count


def test_what_arrives_damaged_is_read_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = FlippingStore(open_store(str(tmp_path / "store")))
    ahead = begin(store, checkpoint)
    assert ahead.wait() < checkpoint.stored_bytes
    assert load(store, checkpoint, ahead) == load(open_store(str(tmp_path / "store")), checkpoint)


def test_a_store_that_fails_meanwhile_is_asked_again(checkpoint: Checkpoint, tmp_path: Path) -> None:
    store = counting_store(tmp_path)

    def fail() -> None:
        raise StoreUnavailable("injected")

    store.before_read = fail
    ahead = begin(store, checkpoint)
    assert ahead.wait() == 0
    with pytest.raises(StoreUnavailable):
        load(store, checkpoint, ahead)
    store.before_read = lambda: None
    assert load(store, checkpoint, ahead) == load(open_store(str(tmp_path / "store")), checkpoint)


def test_reads_that_have_not_begun_are_left_to_the_one_that_needs_them(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The thread that reads ahead hangs; a restore takes over what it did not begin, and ends when it does."""
    store, go = counting_store(tmp_path), threading.Event()
    store.parallel_reads = 1
    store.before_read = lambda: go.wait(60) if threading.current_thread().name.startswith("ckpt-ahead") else None
    ahead = begin(store, checkpoint)
    found: list[dict[str, bytes]] = []
    loading = threading.Thread(target=lambda: found.append(load(store, checkpoint, ahead)))
    loading.start()
    wait_until(lambda: len(store.reads) > 1, "a read by the one that needs it")
    go.set()
    loading.join()
    assert found == [load(open_store(str(tmp_path / "store")), checkpoint)]
    assert store.read_bytes == checkpoint.stored_bytes
