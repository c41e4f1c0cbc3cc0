"""The plan of a shard file: no gaps, aligned, one element type per chunk, whole elements."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckptstore.dtypes import ITEM_BYTES
from ckptstore.shards import CHUNK_BYTES, Entry, encode_chunk, place_entries, plan_chunks, raw_bytes

MIB = 1 << 20
SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.tuples(st.sampled_from([1, 3, 100_000, MIB // 8 - 1, MIB // 4, MIB, 3 * MIB + 1])),
)


@st.composite
def entry_lists(draw: st.DrawFn) -> list[Entry]:
    drawn = draw(st.lists(st.tuples(st.sampled_from(sorted(ITEM_BYTES)), SHAPES), max_size=12))
    return [Entry(f"item/{i}", dtype, shape) for i, (dtype, shape) in enumerate(drawn)]


@given(entry_lists())
def test_entries_lie_back_to_back_and_aligned(entries: list[Entry]) -> None:
    placed = place_entries(entries)
    assert sorted(place.entry.name for place in placed) == sorted(entry.name for entry in entries)
    at = 0
    for place in placed:
        assert place.at == at
        assert place.at % ITEM_BYTES[place.entry.dtype] == 0
        at += place.entry.bytes
    assert raw_bytes(placed) == at
    assert place_entries(entries) == placed, "every rank and every retry must place alike"


@given(entry_lists())
def test_chunks_cover_the_stream(entries: list[Entry]) -> None:
    placed = place_entries(entries)
    spans = plan_chunks(placed)
    at = 0
    for span in spans:
        assert span.at == at, "a gap or an overlap"
        assert 0 < span.bytes <= CHUNK_BYTES
        assert span.bytes % ITEM_BYTES[span.dtype] == 0, "half an element"
        inside = [p for p in placed if p.entry.bytes and p.at < span.at + span.bytes and p.at + p.entry.bytes > span.at]
        assert {p.entry.dtype for p in inside} == {span.dtype}
        at += span.bytes
    assert at == raw_bytes(placed)


def test_small_entries_share_and_large_ones_start_their_own() -> None:
    small = [Entry(f"s/{i}", "float32", (100,)) for i in range(50)]
    assert len(plan_chunks(place_entries(small))) == 1
    large = [Entry(f"l/{i}", "float32", (MIB,)) for i in range(3)]
    assert [span.bytes for span in plan_chunks(place_entries(large))] == [4 * MIB] * 3
    huge = [Entry("h", "float32", (5 * MIB,))]
    assert [span.bytes for span in plan_chunks(place_entries(huge))] == [8 * MIB, 8 * MIB, 4 * MIB]


def test_raw_chunks_are_not_copied() -> None:
    raw = bytearray(b"x" * 64)
    (span,) = plan_chunks(place_entries([Entry("a", "float32", (16,))]))
    chunk = encode_chunk(memoryview(raw), span, compress=False)
    assert (chunk.codec, chunk.raw, chunk.stored) == ("raw", 64, 64)
    raw[0] = 0
    assert bytes(chunk.data)[0] == 0
