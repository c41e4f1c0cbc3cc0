from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject
from ckptstore.format import boxes, planning
from ckptstore.format.boxes import Box, Want, check_cover
from ckptstore.format.columns import column, concatenate
from ckptstore.format.documents import Chunks, Content, Entries, Shard, Slices
from ckptstore.format.parsing import check_content
from ckptstore.format.planning import READ_BYTES, ShardRead, batches, entry_bytes, join, plan_all, plan_reads
from ckptstore.format.shards import CHUNK_BYTES, Slice, place_slices, plan_chunks, slice_tables
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.fetch import place_chunk
from tests.support.checkpoints import whole_entries
from tests.support.layouts import Layout, box_of, boxes_within, deal, layouts, region, with_slices

CHECKPOINT = Checkpoint("gpt", Attempt(1, new_ulid(1_700_000_000.0)), State.COMMITTED)
SPARE = 3


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Layout, list[Want], dict[str, int]]:
    """A layout, requested boxes, and how large their buffers are; several boxes go into one buffer."""
    layout = draw(layouts())
    wants: list[Want] = []
    filled: dict[str, int] = {}
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(layout.arrays)))
        array = layout.arrays[name]
        box = draw(st.none() | boxes_within(array.shape))
        buffer = draw(st.sampled_from(["a", "b", "c"]))
        at = filled.get(buffer, 0) + draw(st.integers(0, SPARE))  # also where no element is aligned
        wants.append(Want(name, box, buffer, at))
        size = array.itemsize * prod(array.shape if box is None else boxes.sizes(box))
        filled[buffer] = at + size
    return layout, wants, filled


def apply(layout: Layout, reads: list[ShardRead], buffers: dict[str, bytearray]) -> None:
    views = {name: memoryview(buffer) for name, buffer in buffers.items()}
    for read in reads:
        stored = memoryview(layout.streams[read.shard])[read.offset : read.offset + read.bytes]
        for chunk in read.chunks:
            place_chunk(CHECKPOINT, chunk, stored[chunk.offset - read.offset :][: chunk.stored], views)


@given(wanted())
def test_a_plan_brings_numpys_slices(drawn: tuple[Layout, list[Want], dict[str, int]]) -> None:
    layout, wants, sizes = drawn
    check_content(str(Attempt(1, new_ulid(1.0))), layout.content, "the layout")
    check_cover(layout.content)
    reads = plan_reads(layout.content, wants)
    buffers = {name: bytearray(b"\xaa" * size) for name, size in sizes.items()}
    apply(layout, reads, buffers)
    expected, needed = {name: bytearray(b"\xaa" * size) for name, size in sizes.items()}, 0
    for want in wants:
        array = layout.arrays[want.entry]
        data = array[region(boxes.whole(array.shape) if want.box is None else want.box)].tobytes()
        expected[want.buffer][want.at : want.at + len(data)] = data
        needed += len(data)
    assert buffers == expected
    chunks = [chunk for read in reads for chunk in read.chunks]
    assert sum(piece.bytes for chunk in chunks for piece in chunk.pieces) == needed, "no byte is placed twice"
    assert all(chunk.pieces for chunk in chunks), "an unneeded chunk is not read"
    assert max(Counter((chunk.shard, chunk.index) for chunk in chunks).values(), default=1) == 1
    assert chunks == sorted(chunks, key=lambda chunk: (chunk.shard, chunk.index))
    for read in reads:
        assert (read.bytes - sum(chunk.stored for chunk in read.chunks)) * 32 <= read.bytes
        assert {chunk.shard for chunk in read.chunks} == {read.shard}


@given(layouts(), st.data())
def test_gaps_and_overlaps_are_refused(layout: Layout, data: st.DataObject) -> None:
    content = layout.content
    rows = range(len(content.slices.entry))
    full = [row for row in rows if 0 not in boxes.sizes(box_of(content, row))]
    if not full:
        return
    victim = data.draw(st.sampled_from(full))
    entry = int(content.slices.entry[victim])
    alike = [row for row in full if content.slices.entry[row] == entry and row != victim]
    other = data.draw(st.none() | st.sampled_from(alike)) if alike else None
    changed = [other if row == victim else row for row in rows]
    broken = with_slices(content, [row for row in changed if row is not None])
    name = content.entries.name[entry]
    with pytest.raises(CorruptObject, match=f"'{name}' leave a gap or overlap"):
        plan_reads(broken, whole_entries([name]))
    with pytest.raises(CorruptObject, match="gap or overlap"):
        check_cover(broken)
    others = [n for n in content.entries.name if n != name]
    assert plan_reads(broken, whole_entries(others)) == plan_reads(content, whole_entries(others)), "they are sound"
    if other is not None:
        with pytest.raises(CorruptObject, match="gap or overlap"):
            plan_reads(with_slices(content, [*rows, other]), [Want(name, box_of(content, other), "x")])


def test_only_what_a_box_needs_must_be_there() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(4, 3)
    layout = deal({"w": array}, {"w": [(0, 0, 2, 3), (2, 0, 2, 3)]}, 2, iter([99] * 9))
    half = with_slices(layout.content, [1])
    assert [read.shard for read in plan_reads(half, [Want("w", (2, 0, 2, 3), "x")])] == ["shard-00001.ckpt"]
    with pytest.raises(CorruptObject, match="gap"):
        plan_reads(half, [Want("w", (1, 0, 3, 3), "x")])


def test_a_chunk_that_cuts_an_element_is_refused() -> None:
    array = np.arange(4, dtype=np.uint32)
    layout = deal({"w": array.view("V4")}, {"w": [(0, 4)]}, 1, iter([9]))
    chunks = layout.content.shards[0].chunks
    chunks.raw.resize(2, refcheck=False)
    chunks.raw[:] = [6, 10]
    for box in (None, (1, 1)):
        with pytest.raises(CorruptObject, match="cuts an element"):
            plan_reads(layout.content, [Want("w", box, "w")])


def test_neighbours_are_fetched_at_once_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(100, dtype=np.uint8)
    layout = deal({"w": array}, {"w": [(i, 10) for i in range(0, 100, 10)]}, 1, iter([10] * 10))
    monkeypatch.setattr(planning, "READ_BYTES", 40)
    assert [read.bytes for read in plan_reads(layout.content, whole_entries(["w"]))] == [40, 40, 20]
    monkeypatch.setattr(planning, "READ_BYTES", 1)
    assert len(plan_reads(layout.content, whole_entries(["w"]))) == 10, "a chunk larger than the limit is read alone"
    assert (len(plan_all(layout.content)), entry_bytes(layout.content)) == (10, {"w": 100})


@pytest.mark.parametrize(("gap", "reads"), [(3, 1), (4, 2)])
def test_small_gaps_are_read_over(gap: int, reads: int) -> None:
    """100 bytes, a gap, one byte: at most a 32nd of what is fetched may be unneeded."""
    array = np.zeros(101 + gap, np.uint8)
    layout = deal({"w": array}, {"w": [(0, 100), (100, gap), (100 + gap, 1)]}, 1, iter([100, gap, 1]))
    found = plan_reads(layout.content, [Want("w", (0, 100), "a"), Want("w", (100 + gap, 1), "b")])
    assert len(found) == reads


# Even parts of the first dimension: the layout of fully_shard, and the bytes that it costs.

TRANSFORMER = {
    "wte": (50257, 768), "wpe": (1024, 768),
    **{
        f"h.{i}.{name}": shape
        for i in range(12)
        for name, shape in {
            "ln.weight": (768,), "ln.bias": (768,), "attn.weight": (2304, 768), "attn.bias": (2304,),
            "proj.weight": (768, 768), "fc.weight": (3072, 768), "fc.bias": (3072,), "out.weight": (768, 3072),
        }.items()
    },
}  # fmt: skip


def part(shape: tuple[int, ...], parts: int, number: int) -> Box:
    """As torch cuts the first dimension."""
    step = -(-shape[0] // parts)
    first = min(step * number, shape[0])
    return (first, *(0 for _ in shape[1:]), min(step, shape[0] - first), *shape[1:])


def saved(shapes: dict[str, tuple[int, ...]], ranks: int) -> Layout:
    """The real cuts of the writers, with no data."""
    tables = []
    for rank in range(ranks):
        held = [Slice(name, "float32", shape, part(shape, ranks, rank)) for name, shape in shapes.items()]
        placed = place_slices(piece for piece in held if piece.bytes)
        spans = plan_chunks(placed)
        assert max(span.bytes for span in spans) <= CHUNK_BYTES
        tables.append((slice_tables(placed), [span.bytes for span in spans]))
    return merged(tables)


def merged(tables: list[Any]) -> Layout:
    names = tables[0][0][0].name
    found: dict[str, list[npt.NDArray[np.int64]]] = {"entry": [], "shard": [], "at": [], "box": []}
    shards = []
    for rank, ((entries, slices), raw) in enumerate(tables):
        found["entry"].append(column(names.index(entries.name[entry]) for entry in slices.entry.tolist()))
        found["shard"].append(slices.shard + rank)
        found["at"].append(slices.at)
        found["box"].append(slices.box)
        sizes = column(raw)
        chunks = Chunks(raw=sizes, stored=sizes, codec=sizes * 0, codecs=["raw"], digest=bytes(16 * len(raw)))
        shards.append(Shard(name=f"shard-{rank:05d}.ckpt", rank=rank, chunks=chunks))
    entries = Entries(name=names, dtype=tables[0][0][0].dtype, shape=tables[0][0][0].shape)
    columns = Slices(**{name: concatenate(parts) for name, parts in found.items()})
    return Layout(Content(shards=shards, entries=entries, slices=columns, aliases={}, trees={}), {}, {})


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 4, 8])
def test_a_rank_fetches_its_part_and_little_else(ranks: int, readers: int) -> None:
    content = saved(TRANSFORMER, ranks).content
    check_content(str(Attempt(1, new_ulid(1.0))), content, "the layout")
    for reader in range(readers):
        wants = [Want(name, part(shape, readers, reader), name) for name, shape in TRANSFORMER.items()]
        fetched = sum(read.bytes for read in plan_reads(content, wants))
        needed = sum(prod(boxes.sizes(want.box or ())) * 4 for want in wants)
        assert needed <= fetched <= 1.05 * needed, (reader, fetched / needed)


@pytest.mark.parametrize("shape", [(50257, 768), (768, 3072), (3072, 768)])
def test_one_tensor_of_a_rank_of_eight(shape: tuple[int, int]) -> None:
    for ranks in (1, 2, 4):
        content = saved({"w": shape, "bias": (768,)}, ranks).content
        for box in (part(shape, 8, reader) for reader in range(8)):
            fetched = sum(read.bytes for read in plan_reads(content, [Want("w", box, "w")]))
            assert fetched <= 1.05 * prod(boxes.sizes(box)) * 4


def test_stretches_that_adjoin_become_one() -> None:
    reads = plan_reads(saved({"w": (40 * CHUNK_BYTES // 4,)}, 2).content, [Want("w", None, "w")])
    assert ([read.bytes // CHUNK_BYTES for read in reads], join(reads, READ_BYTES)) == ([2] * 20, reads)
    joined = join(reads, 3 * READ_BYTES)
    assert [(read.shard, read.bytes // READ_BYTES) for read in joined] == [
        (shard, units) for shard in ("shard-00000.ckpt", "shard-00001.ckpt") for units in (3, 3, 3, 1)
    ]
    assert [chunk for read in joined for chunk in read.chunks] == [chunk for read in reads for chunk in read.chunks]
    assert join([reads[0], reads[2]], 3 * READ_BYTES) == [reads[0], reads[2]], "there is a gap between them"


def test_an_item_larger_than_a_batch_does_not_wait_for_the_next_one() -> None:
    asked: list[int] = []

    def items() -> Iterator[int]:
        for size in (3, 1, 9, 2, 2):
            asked.append(size)
            yield size

    found = [(batch, len(asked)) for batch in batches(items(), int, 4)]
    assert found == [([3, 1], 3), ([9], 3), ([2, 2], 5)]
