"""From a store to destinations: what was planned is fetched, checked, decoded and placed."""

from __future__ import annotations

import random
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
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, whole_entries, write_checkpoint, write_rank


def load(store: Store, checkpoint: Checkpoint, threads: int = 4) -> dict[str, bytes]:
    source = StoreSource(store)
    content = read_manifest(source, checkpoint).content
    buffers = {name: bytearray(size) for name, size in entry_bytes(content).items()}
    views = {name: memoryview(buffer) for name, buffer in buffers.items()}
    done: list[int] = []
    reads = plan_reads(content, whole_entries(content.entries.name))
    fetch(source, checkpoint, reads, views, progress=done.append, threads=threads)
    assert sum(done) == sum(chunk.raw for read in reads for chunk in read.chunks)
    return {name: bytes(buffer) for name, buffer in buffers.items()}


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


def test_several_ranks_and_a_subset(store: Store) -> None:
    attempt = Attempt(3, new_ulid(system_clock()))
    parts = [sample_arrays(rank) for rank in range(3)]
    arrays = {f"rank-{rank}/{name}": array for rank, part in enumerate(parts) for name, array in part.items()}
    receipts = [
        write_rank(store, "gpt", attempt, {f"rank-{rank}/{n}": a for n, a in part.items()}, rank, 3)
        for rank, part in enumerate(parts)
    ]
    run = Run(store, "gpt")
    commit_attempt(run, receipts)
    checkpoint = latest(run)
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
    good = store.get(key)
    chance = random.Random(1)
    places = [0, len(good) - 1, *(chance.randrange(len(good)) for _ in range(6))]
    for at in places:
        damaged = bytearray(good)
        damaged[at] ^= 1 << chance.randrange(8)
        store.put(key, bytes(damaged))
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
    attempt = Attempt(4, new_ulid(system_clock()))
    parts = [sample_arrays(rank) for rank in range(2)]
    receipts = [
        write_rank(store, "gpt", attempt, {f"rank-{rank}/{n}": a for n, a in part.items()}, rank, 2)
        for rank, part in enumerate(parts)
    ]
    run = Run(store, "gpt")
    commit_attempt(run, receipts)
    source, checkpoint = StoreSource(store), latest(run)
    content = read_manifest(source, checkpoint).content
    buffer = bytearray(b"\xaa" * (100 * 50 * 4 + 20 * 2 + 7))
    wants = [
        Want("rank-1/model/weight", (300, 500, 100, 50), "x", 3),
        Want("rank-0/model/half", (60, 13, 1, 20), "x", 100 * 50 * 4 + 3),
    ]
    fetch(source, checkpoint, plan_reads(content, wants), {"x": memoryview(buffer)})
    weight = parts[1]["model/weight"][300:400, 500:550].tobytes()
    half = parts[0]["model/half"][60:61, 13:33].tobytes()
    assert bytes(buffer) == b"\xaa" * 3 + weight + half + b"\xaa" * 4


def test_after_an_error_the_rest_is_given_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "READ_BYTES", 1)  # each chunk is fetched alone
    arrays = {f"model/{i}": np.full((1, 1 << 16), i, dtype=np.float32) for i in range(40)}
    checkpoint = write_checkpoint(store, arrays=arrays)
    source = StoreSource(store)
    content = read_manifest(source, checkpoint).content
    reads = plan_reads(content, whole_entries(content.entries.name))
    assert len(reads) == 40
    (chunk,) = reads[0].chunks
    bad = [ShardRead((replace(chunk, digest="0" * 32),)), *reads[1:]]
    done: list[int] = []
    views = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    with pytest.raises(CorruptObject, match="chunk 0 of shard-00000"):
        fetch(source, checkpoint, bad, views, progress=done.append, threads=1)
    assert done == []
