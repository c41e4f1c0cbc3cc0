from __future__ import annotations

import random
import shutil
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import CodingPolicy, fast, off
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.commits.catalog import Checkpoint, latest
from ckptstore.commits.commit import commit_attempt
from ckptstore.errors import CorruptObject, ObjectMissing
from ckptstore.format import planning
from ckptstore.format.boxes import Want
from ckptstore.format.planning import ShardRead, entry_bytes, plan_all, plan_reads
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.fetch import StoredChunks, Stretches, fetch, fetch_from
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import (
    flip,
    flipped,
    read_all,
    sample_arrays,
    whole_entries,
    write_checkpoint,
    write_rank,
)
from tests.support.stores import race


def load(store: Store, checkpoint: Checkpoint, threads: int = 4) -> dict[str, bytes]:
    done: list[int] = []
    found = read_all(StoreSource(store), checkpoint, threads, done.append)
    assert sum(done) == checkpoint.raw_bytes
    return found


def planned(source: StoreSource, checkpoint: Checkpoint) -> tuple[list[ShardRead], dict[str, memoryview]]:
    """Reads of all entries, and buffers for them."""
    content = read_manifest(source, checkpoint).content
    buffers = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    return plan_reads(content, whole_entries(buffers)), buffers


def special_arrays() -> dict[str, Any]:
    """NaNs with payloads, both zeros, denormals, every numpy type, empty and zero-dimensional, and large."""
    words = np.array([0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0, 1, 0x807FFFFF], dtype=np.uint32)
    rng = np.random.default_rng(1)
    return {
        "model/nan": np.tile(words, 5000).view(np.float32),
        "model/large": (rng.standard_normal(3_000_001) * 0.02).astype(np.float32),
        "model/f16": (rng.standard_normal((255, 257)) * 0.02).astype(np.float16),
        "model/odd": rng.integers(0, 255, 65_537, dtype=np.uint8),
        **{
            f"model/{dtype}": np.arange(7).astype(dtype) for dtype in ("bool", "int8", "uint64", "complex64", "float64")
        },
        **{f"model/empty-{i}": np.zeros(shape) for i, shape in enumerate([(0,), (3, 0), ()])},
    }


@pytest.mark.parametrize("store", ["local", "memory", "s3"], indirect=True)
@pytest.mark.parametrize("coding", [off, fast])
def test_arrays_come_back_bit_by_bit(store: Store, coding: CodingPolicy) -> None:
    arrays = special_arrays()
    checkpoint = write_checkpoint(store, arrays=arrays, coding=coding)
    expected = {name: array.tobytes() for name, array in arrays.items()}
    assert load(store, checkpoint) == load(store, checkpoint, threads=1) == expected


def of_ranks(store: Store, world: int) -> tuple[Checkpoint, dict[str, Any]]:
    """A checkpoint of as many ranks, and its arrays."""
    attempt = Attempt(3, new_ulid(system_clock()))
    parts = [{f"rank-{rank}/{n}": a for n, a in sample_arrays(rank).items()} for rank in range(world)]
    receipts = [write_rank(store, "gpt", attempt, part, rank, world) for rank, part in enumerate(parts)]
    commit_attempt(Run(store, "gpt"), receipts)
    return latest(Run(store, "gpt")), {name: array for part in parts for name, array in part.items()}


def test_several_ranks_and_a_subset(store: Store) -> None:
    checkpoint, arrays = of_ranks(store, 3)
    assert (checkpoint.num_shards, checkpoint.world_size, checkpoint.num_entries) == (3, 3, len(arrays))
    assert load(store, checkpoint) == {name: array.tobytes() for name, array in arrays.items()}
    content = read_manifest(StoreSource(store), checkpoint).content
    wanted = plan_reads(content, whole_entries(["rank-1/model/ids"]))
    assert [read.shard for read in wanted] == ["shard-00001.ckpt"], "only what is wanted is read"
    assert len(plan_all(content)) == sum(len(shard.chunks.raw) for shard in content.shards)
    assert all(ITEM_BYTES[dtype] for dtype in content.entries.dtype)


@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
@pytest.mark.parametrize("coding", [off, fast])
def test_damage_is_found(store: Store, coding: CodingPolicy) -> None:
    arrays = special_arrays()
    checkpoint = write_checkpoint(store, arrays=arrays, coding=coding)
    key = RunKeys("gpt").shard(checkpoint.attempt, "shard-00000.ckpt")
    good, chance = store.get(key), random.Random(1)
    for at in [0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(6))]:
        store.put(key, flipped(good, at, 1 << chance.randrange(8)))
        with pytest.raises(CorruptObject, match="checksum"):
            load(store, checkpoint)
    store.put(key, good[:-1])
    with pytest.raises(CorruptObject, match=f"ends after {len(good) - 1} bytes"):
        load(store, checkpoint)
    store.delete_many([key])
    with pytest.raises(ObjectMissing, match="shard-00000"):
        load(store, checkpoint)


def test_parts_of_what_two_ranks_hold(store: Store) -> None:
    """Boxes of encoded chunks, into buffers where other things lie."""
    checkpoint, arrays = of_ranks(store, 2)
    source, buffer = StoreSource(store), bytearray(b"\xaa" * (100 * 50 * 4 + 20 * 2 + 7))
    wants = [
        Want("rank-1/model/weight", (300, 500, 100, 50), "x", 3),
        Want("rank-0/model/half", (60, 13, 1, 20), "x", 100 * 50 * 4 + 3),
    ]
    reads = plan_reads(read_manifest(source, checkpoint).content, wants)
    fetch(source, checkpoint, reads, {"x": memoryview(buffer)})
    weight = arrays["rank-1/model/weight"][300:400, 500:550].tobytes()
    half = arrays["rank-0/model/half"][60:61, 13:33].tobytes()
    assert bytes(buffer) == b"\xaa" * 3 + weight + half + b"\xaa" * 4


def test_after_an_error_the_rest_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "READ_BYTES", 1)  # each chunk is fetched alone
    arrays = {f"model/{i}": np.full((1, 1 << 16), i, dtype=np.float32) for i in range(40)}
    checkpoint, source = write_checkpoint(store, arrays=arrays), StoreSource(store)
    reads, views = planned(source, checkpoint)
    assert len(reads) == 40
    (chunk,) = reads[0].chunks
    bad = [ShardRead((replace(chunk, digest="0" * 32),)), *reads[1:]]
    done: list[int] = []
    with pytest.raises(CorruptObject, match="chunk 0 of shard-00000"):
        fetch(source, checkpoint, bad, views, progress=done.append, threads=1)
    assert done == []


def take_all(stretches: Stretches[int], thread: int) -> list[int]:
    taken = []
    while (item := stretches.take(thread)) is not None:
        taken.append(item)
    return taken


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 3), (7, 2), (1000, 4)])
def test_every_item_is_taken_once(count: int, threads: int) -> None:
    stretches = Stretches(range(count), threads)
    results = race(*(partial(take_all, stretches, thread) for thread in range(threads)))
    taken = [result for result in results if isinstance(result, list)]
    assert sorted(chain.from_iterable(taken)) == list(range(count))


def test_threads_go_from_front_to_back() -> None:
    stretches = Stretches(range(8), 2)
    order = [(thread, stretches.take(thread)) for thread in (0, 1, 0, 1, 1, 0, 0, 1)]
    assert [item for thread, item in order if thread == 0] == [0, 1, 2, 3]
    assert [item for thread, item in order if thread == 1] == [4, 5, 6, 7]


def test_who_is_done_takes_the_back_half_of_the_longest_rest() -> None:
    stretches = Stretches(range(12), 3)
    assert take_all(stretches, 2)[:4] == [8, 9, 10, 11]
    stretches = Stretches(range(12), 3)
    for _ in range(4):
        stretches.take(2)
    stretches.take(1)
    assert [stretches.take(2) for _ in range(2)] == [2, 3], "of the first, which has most to do"
    assert [stretches.take(0) for _ in range(2)] == [0, 1]


ARRAYS = {**sample_arrays(), "model/large": np.arange(5_000_000, dtype=np.float32)}


@pytest.fixture(params=[off, fast])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A checkpoint in the folders remote and local, object for object."""
    coding: CodingPolicy = request.param
    checkpoint = write_checkpoint(open_store(str(tmp_path / "remote")), arrays=ARRAYS, coding=coding)
    shutil.copytree(tmp_path / "remote", tmp_path / "local")
    return checkpoint


def restore(tmp_path: Path, checkpoint: Checkpoint) -> tuple[list[ShardRead], dict[str, int]]:
    """What is left after the local tier, and the bytes read there; checks that all bytes are right in the end."""
    remote, local = (StoreSource(open_store(str(tmp_path / name))) for name in ("remote", "local"))
    reads, buffers = planned(remote, checkpoint)
    done: list[int] = []
    left, found = fetch_from([StoredChunks("local", local, checkpoint)], reads, buffers, done.append)
    fetch(remote, checkpoint, left, buffers, done.append)
    assert {name: bytes(buffer) for name, buffer in buffers.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}
    assert sum(done) == sum(chunk.raw for read in reads for chunk in read.chunks)  # each chunk counts once
    return left, found


def shard_of(tmp_path: Path, tier: str) -> Path:
    [found] = (tmp_path / tier).rglob("shard-00000.ckpt")
    return found


def test_all_chunks_come_from_the_nearest(tmp_path: Path, written: Checkpoint) -> None:
    shard_of(tmp_path, "remote").unlink()
    left, found = restore(tmp_path, written)
    assert (left, found) == ([], {"local": sum(array.nbytes for array in ARRAYS.values())})


def test_damage_is_read_from_the_next(tmp_path: Path, written: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    shard = shard_of(tmp_path, "local")
    flip(shard)
    left, found = restore(tmp_path, written)
    assert sum(len(read.chunks) for read in left) == 1
    assert found["local"] == sum(array.nbytes for array in ARRAYS.values()) - left[0].chunks[0].raw
    assert "read from elsewhere" in caplog.text
    buffers = {name: memoryview(bytearray(array.nbytes)) for name, array in ARRAYS.items()}
    with pytest.raises(CorruptObject):  # without another source it is an error
        fetch(StoreSource(open_store(str(tmp_path / "local"))), written, left, buffers)


def test_a_truncated_or_missing_shard_is_read_from_the_next(tmp_path: Path, written: Checkpoint) -> None:
    shard = shard_of(tmp_path, "local")
    shard.write_bytes(shard.read_bytes()[:-1])
    left, _ = restore(tmp_path, written)
    assert sum(len(read.chunks) for read in left) == 1
    shard.unlink()
    _, found = restore(tmp_path, written)
    assert found == {"local": 0}


def test_a_store_that_is_away_is_not_asked_again(tmp_path: Path, written: Checkpoint) -> None:
    source = StoreSource(open_store(str(tmp_path / "local")))
    shutil.rmtree(tmp_path / "local")  # as an unmounted volume
    reads, buffers = planned(StoreSource(open_store(str(tmp_path / "remote"))), written)
    left = StoredChunks("local", source, written).fetch(reads, buffers, lambda _: None)
    assert sum(chunk.raw for read in left for chunk in read.chunks) == sum(a.nbytes for a in ARRAYS.values())
