"""From slices to destinations: every byte once, in its place, checked; a gap or an overlap is refused."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore import names
from ckptstore.catalog import Checkpoint, latest
from ckptstore.clock import system_clock
from ckptstore.commit import commit_attempt
from ckptstore.documents import Chunks, Content, Entries, Shard, Slices
from ckptstore.dtypes import ITEM_BYTES
from ckptstore.errors import CorruptObject, ObjectMissing
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading import ChunkRead, _runs, entry_bytes, fetch, plan_all, plan_reads
from ckptstore.source import StoreSource, read_manifest
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint, write_rank


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)]
    return shape, offsets, sizes


def indices(shape: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


@given(boxes(), st.sampled_from([1, 2, 4, 8, 16]))
def test_runs_of_a_box_are_numpys(drawn: tuple[list[int], list[int], list[int]], item: int) -> None:
    shape, offsets, sizes = drawn
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    expected = (indices(shape)[box].reshape(-1)[:, None] * item + np.arange(item)).reshape(-1)
    runs = list(_runs(shape, [*offsets, *sizes], item))
    assert [byte for start, size in runs for byte in range(start, start + size)] == expected.tolist()
    assert all(size > 0 for _, size in runs)
    if sizes == shape:
        assert list(_runs(shape, None, item)) == runs, "a whole box is the whole entry"
        assert len(runs) <= 1


def tiled(shape: list[int], cuts: list[list[int]], chunk: int, shards: int) -> Content:
    """An int64 entry cut along every dimension, its boxes dealt to several shards, in chunks of `chunk` elements."""
    edges = [[0, *sorted(c), size] for c, size in zip(cuts, shape, strict=True)]
    boxes: list[list[int] | None] = [
        [*(low for low, _ in corner), *(high - low for low, high in corner)]
        for corner in product(*(list(pairwise(e)) for e in edges))
    ]
    owner = [i % shards for i in range(len(boxes))]
    filled = [0] * shards
    at = []
    for box, shard in zip(boxes, owner, strict=True):
        assert box is not None
        at.append(filled[shard] * 8)
        filled[shard] += prod(box[len(shape) :])
    tables = []
    for rank, elements in enumerate(filled):
        sizes = [min(chunk, elements - start) * 8 for start in range(0, elements, chunk)]
        n = len(sizes)
        tables.append(
            Shard(name=names.shard_name(rank), rank=rank,
                  chunks=Chunks(raw=sizes, stored=sizes, codec=["raw"] * n, digest=["0" * 32] * n))
        )  # fmt: skip
    return Content(
        shards=tables,
        entries=Entries(name=["other", "entry"], dtype=["int64", "int64"], shape=[[0], shape]),
        slices=Slices(entry=[1] * len(boxes), shard=owner, at=at, box=boxes),
        aliases={},
        trees={},
    )


@st.composite
def tilings(draw: st.DrawFn) -> Content:
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    cuts = [draw(st.lists(st.integers(0, size), max_size=2)) for size in shape]
    return tiled(shape, cuts, draw(st.integers(1, 9)), draw(st.integers(1, 3)))


@given(tilings())
def test_a_plan_puts_every_byte_in_its_place_once(content: Content) -> None:
    shape = content.entries.shape[1]
    streams: list[list[int]] = [[] for _ in content.shards]
    for shard, box in zip(content.slices.shard, content.slices.box, strict=True):
        assert box is not None
        region = tuple(slice(o, o + s) for o, s in zip(box[: len(shape)], box[len(shape) :], strict=True))
        streams[shard] += indices(shape)[region].reshape(-1).tolist()
    raw = {
        shard.name: np.array(stream, np.int64).tobytes() for shard, stream in zip(content.shards, streams, strict=True)
    }
    placed = bytearray(prod(shape) * 8)
    written = np.zeros(len(placed), dtype=int)
    reads = plan_reads(content, ["entry", "other"])
    for read in reads:
        for piece in read.pieces:
            assert piece.entry == "entry"
            begin = read.offset + piece.at  # chunks are raw here, so that offsets agree
            placed[piece.into : piece.into + piece.bytes] = raw[read.shard][begin : begin + piece.bytes]
            written[piece.into : piece.into + piece.bytes] += 1
    assert (written == 1).all()
    assert bytes(placed) == indices(shape).tobytes()
    assert len({(read.shard, read.index) for read in reads}) == len(reads), "a chunk is fetched once"
    assert plan_reads(content, []) == []


@given(tilings(), st.data())
def test_gaps_and_overlaps_are_refused(content: Content, data: st.DataObject) -> None:
    slices = content.slices
    full = [i for i, box in enumerate(slices.box) if box is not None and 0 not in box[len(box) // 2 :]]
    victim = data.draw(st.sampled_from(full))
    columns: dict[str, list[Any]] = {field: list(getattr(slices, field)) for field in ("entry", "shard", "at", "box")}
    if data.draw(st.booleans(), label="replace by another, which may keep the sum of bytes right"):
        other = data.draw(st.sampled_from(full))
        if other == victim:
            return
        columns["box"][victim] = columns["box"][other]
        columns["at"][victim], columns["shard"][victim] = columns["at"][other], columns["shard"][other]
    else:
        for column in columns.values():
            del column[victim]
    broken = msgspec.structs.replace(content, slices=Slices(**columns))
    with pytest.raises(CorruptObject, match="'entry' have a gap or an overlap"):
        plan_reads(broken, ["entry"])


def load(store: Store, checkpoint: Checkpoint, threads: int = 4) -> dict[str, bytes]:
    source = StoreSource(store)
    content = read_manifest(source, checkpoint).content
    buffers = {name: bytearray(size) for name, size in entry_bytes(content).items()}
    views = {name: memoryview(buffer) for name, buffer in buffers.items()}
    done: list[int] = []
    reads = plan_reads(content, content.entries.name)
    fetch(source, checkpoint, reads, views, progress=done.append, threads=threads)
    assert sum(done) == sum(read.raw for read in reads)
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
def test_arrays_come_back_bit_by_bit(store: Store) -> None:
    arrays = special_arrays()
    checkpoint = write_checkpoint(store, arrays=arrays)
    assert load(store, checkpoint) == {name: array.tobytes() for name, array in arrays.items()}


def test_several_ranks_and_a_subset(store: Store) -> None:
    attempt = Attempt(3, new_ulid(system_clock()))
    parts = [sample_arrays(rank) for rank in range(3)]
    arrays = {f"rank-{rank}/{name}": array for rank, part in enumerate(parts) for name, array in part.items()}
    receipts = [
        write_rank(store, "gpt", attempt, {f"rank-{rank}/{n}": a for n, a in part.items()}, rank, 3)
        for rank, part in enumerate(parts)
    ]
    commit_attempt(store, receipts, system_clock)
    checkpoint = latest(store, "gpt")
    assert (checkpoint.num_shards, checkpoint.world_size, checkpoint.num_entries) == (3, 3, len(arrays))
    assert load(store, checkpoint) == {name: array.tobytes() for name, array in arrays.items()}
    content = read_manifest(StoreSource(store), checkpoint).content
    wanted = plan_reads(content, ["rank-1/model/ids"])
    assert [read.shard for read in wanted] == ["shard-00001.ckpt"], "only what is wanted is read"
    assert len(plan_all(content)) == sum(len(shard.chunks.raw) for shard in content.shards)
    assert all(ITEM_BYTES[dtype] for dtype in content.entries.dtype)


def test_damage_is_found_before_a_byte_is_placed(store: Store) -> None:
    checkpoint = write_checkpoint(store)
    key = names.shard_key("gpt", checkpoint.attempt, "shard-00000.ckpt")
    good = store.get(key)
    damaged = bytearray(good)
    damaged[len(damaged) // 2] ^= 4
    for data, message in ((bytes(damaged), "checksum"), (good[:-1], "ends after")):
        store.put(key, data)
        with pytest.raises(CorruptObject, match=message):
            load(store, checkpoint)
    store.delete_many([key])
    with pytest.raises(ObjectMissing, match="shard-00000"):
        load(store, checkpoint)


def test_after_an_error_the_rest_is_given_up(store: Store) -> None:
    arrays = {f"model/{i}": np.full(1 << 18, i, dtype=np.float32) for i in range(40)}  # a chunk of its own each
    checkpoint = write_checkpoint(store, arrays=arrays)
    source = StoreSource(store)
    content = read_manifest(source, checkpoint).content
    reads = plan_reads(content, content.entries.name)
    assert len(reads) == 40
    bad = [ChunkRead(**{**{f: getattr(reads[0], f) for f in ChunkRead.__slots__}, "digest": "0" * 32}), *reads[1:]]
    done: list[int] = []
    views = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    with pytest.raises(CorruptObject, match="chunk 0 of shard-00000"):
        fetch(source, checkpoint, bad, views, progress=done.append, threads=1)
    assert done == []
