from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs.chunk_codecs import Coding
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.format.shards import CHUNK_BYTES, Slice, encode_chunk, place_slices, plan_chunks, raw_bytes

MIB = 1 << 20
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.tuples(st.sampled_from([1, 3, 100_000, MIB // 8 - 1, MIB // 4, MIB, 3 * MIB + 1])),
    st.tuples(st.integers(1, 50_000), st.integers(1, 300)),
)


@st.composite
def slice_lists(draw: st.DrawFn) -> list[Slice]:
    drawn = draw(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=12))
    rows = [draw(st.integers(0, shape[0] - 1)) if shape and shape[0] else 0 for _, shape in drawn]
    return [
        Slice(f"item/{i}", dtype, shape, (row, *(0 for _ in shape[1:]), shape[0] - row, *shape[1:]) if shape else ())
        for i, ((dtype, shape), row) in enumerate(zip(drawn, rows, strict=True))
    ]


@given(slice_lists())
def test_slices_lie_back_to_back_and_aligned(pieces: list[Slice]) -> None:
    placed = place_slices(pieces)
    assert sorted(place.slice.entry for place in placed) == sorted(piece.entry for piece in pieces)
    at = 0
    for place in placed:
        assert (place.at, place.at % ITEM_BYTES[place.slice.dtype]) == (at, 0)
        at += place.slice.bytes
    assert raw_bytes(placed) == at
    assert place_slices(pieces) == placed, "every rank and every retry must place alike"


@given(slice_lists())
def test_chunks_cover_the_stream(pieces: list[Slice]) -> None:
    placed = place_slices(pieces)
    spans, at = plan_chunks(placed), 0
    for span in spans:
        assert span.at == at, "a gap or an overlap"
        assert 0 < span.bytes <= CHUNK_BYTES
        assert span.bytes % ITEM_BYTES[span.dtype] == 0, "half an element"
        inside = [p for p in placed if p.slice.bytes and p.at < span.at + span.bytes and p.at + p.slice.bytes > span.at]
        assert {p.slice.dtype for p in inside} == {span.dtype}
        at += span.bytes
    assert at == raw_bytes(placed)


def test_small_slices_share_and_large_ones_start_their_own() -> None:
    assert len(plan_chunks(place_slices([Slice.whole(f"s/{i}", "float32", (100,)) for i in range(50)]))) == 1
    large = [Slice.whole(f"l/{i}", "float32", (1, MIB // 10)) for i in range(3)]
    assert [span.bytes for span in plan_chunks(place_slices(large))] == [MIB // 10 * 4] * 3


def sizes(piece: Slice) -> list[int]:
    return [span.bytes for span in plan_chunks(place_slices([piece]))]


def test_large_slices_are_cut_where_halves_quarters_and_eighths_end() -> None:
    assert sizes(Slice.whole("a", "float32", (5 * MIB,))) == [5 * MIB // 2] * 8
    row = 4096
    assert sizes(Slice.whole("b", "float32", (800, row // 4))) == [100 * row] * 8
    eighths, quarters = {101 * n for n in range(1, 8)}, {201, 402, 603}
    ends = [0, *sorted({*eighths, *quarters, 402}), 803]  # torch rounds up: 803 rows are 402, 201 or 101 at a time
    assert sizes(Slice.whole("c", "float32", (803, row // 4))) == [(b - a) * row for a, b in pairwise(ends)]
    assert sizes(Slice("d", "float32", (800, row // 4), (150, 0, 200, row // 4))) == [50 * row, 100 * row, 50 * row]
    assert sizes(Slice.whole("e", "float32", (7, 4 * row))) == [16 * row] * 7
    assert sizes(Slice.whole("f", "float32", (40 * MIB // 4 // 8, 8))) == [5 * MIB] * 8
    assert sizes(Slice("g", "float32", (160 * MIB // 4,), (0, 20 * MIB // 4))) == [
        27 * MIB // 4, 27 * MIB // 4, 26 * MIB // 4,
    ]  # fmt: skip


def test_raw_chunks_are_not_copied() -> None:
    raw = bytearray(b"x" * 64)
    (span,) = plan_chunks(place_slices([Slice.whole("a", "float32", (16,))]))
    chunk = encode_chunk(span.of(memoryview(raw)), Coding("raw"))
    assert (chunk.codec, chunk.raw, chunk.stored) == ("raw", 64, 64)
    raw[0] = 0
    assert bytes(chunk.data)[0] == 0
