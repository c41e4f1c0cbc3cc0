"""Deltas give back every bit of the chunk, and refuse garbage and other bases with CorruptObject alone."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs import delta
from ckptstore.codecs.chunk_codecs import decode
from ckptstore.codecs.dtypes import ITEM_BYTES, cast
from ckptstore.errors import CorruptObject

GUARD = b"\xa5" * 64


def encoded(raw: bytes, base: bytes, item: int) -> bytes:
    return delta.encode(memoryview(raw), memoryview(base), item)


def decoded(stored: bytes, base: bytes) -> bytes:
    """Decode into the middle of a larger buffer, whose rest must stay as it was."""
    buffer = bytearray(GUARD + base + GUARD)
    try:
        decode(delta.DELTA, memoryview(stored), memoryview(buffer)[len(GUARD) : len(GUARD) + len(base)])
    finally:
        assert buffer[: len(GUARD)] == buffer[len(GUARD) + len(base) :] == GUARD
    return bytes(buffer[len(GUARD) : -len(GUARD)])


@pytest.mark.parametrize("item", sorted({*ITEM_BYTES.values()}))
@given(data=st.data())
def test_any_two_chunks(item: int, data: st.DataObject) -> None:
    words = data.draw(st.integers(1, 60))
    base = data.draw(st.binary(min_size=item * words, max_size=item * words)) * 7
    raw = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, len(base) - 1))):
        raw[at] = data.draw(st.integers(0, 255))
    assert decoded(encoded(bytes(raw), base, item), base) == raw


def trained(words: int, share: float) -> tuple[bytes, bytes]:
    """bfloat16 weights before and after an update that changes about this share of them."""
    rng = np.random.default_rng(words)
    weights = (rng.standard_normal(words) * 0.02).astype(np.float32)
    step = (rng.standard_normal(words) * 1e-5).astype(np.float32) * (rng.random(words) < share)
    before, after = (
        cast(w.astype(np.float32).view(np.uint32), "bfloat16").tobytes() for w in (weights, weights + step)
    )
    return before, after


@pytest.mark.parametrize(("share", "limit"), [(0.0, 0.0004), (0.001, 0.0005), (0.05, 0.008), (1.0, 0.17)])
def test_what_changes_little_takes_little(share: float, limit: float) -> None:
    before, after = trained(500_000, share)
    stored = encoded(after, before, 2)
    assert len(stored) < limit * len(after)
    assert decoded(stored, before) == after


def test_equal_differences_of_other_bases_are_other_deltas() -> None:
    one, two = (np.full(1000, value, np.uint16).tobytes() for value in (5, 9))
    first, second = (encoded(raw, base, 2) for raw, base in ((two, one), (one, two)))
    assert first != encoded(np.full(1000, 13, np.uint16).tobytes(), two, 2)
    with pytest.raises(CorruptObject, match="does not give"):
        decoded(first, two)
    assert decoded(second, two) == one


@given(data=st.data())
def test_damaged_deltas_are_refused(data: st.DataObject) -> None:
    before, after = trained(2000, data.draw(st.sampled_from([0.01, 1.0])))
    stored = bytearray(encoded(after, before, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stored) - 1))
        stored[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(stored)))
    for damaged in (bytes(stored[:cut]), bytes(stored), bytes(stored) + b"\0"):
        with contextlib.suppress(CorruptObject):
            assert decoded(damaged, before) == after


LIMITS = bytes(3 * 2)
NONE = struct.pack("<I", 0) + 2 * struct.pack("<BI", 0, 0)


def rice(low: int, unary: bytes, apart: bytes = b"") -> bytes:
    return struct.pack("<BI", low, len(unary)) + unary + apart


def listed(count: int, gaps: bytes, changes: bytes) -> bytes:
    """Of the four lists only the last one has words."""
    return LIMITS + 3 * NONE + struct.pack("<I", count) + gaps + changes


def framed(unary: bytes) -> bytes:
    return rice(128, zstandard.compress(unary))


def test_one_difference_is_a_gap_and_a_change() -> None:
    """The deltas that make no sense differ from these in one part."""
    base = bytes(100)
    raw = bytes(4) + b"\xff\xff" + bytes(94)
    for gaps in (rice(0, b"\x20"), rice(1, b"\x40", b"\0"), framed(b"\x20")):
        digest = xxhash.xxh3_128_digest(raw)
        assert decoded(digest + b"\2" + listed(1, gaps, rice(0, b"\x80")), base) == raw


@pytest.mark.parametrize(
    ("width", "rest"),
    [
        (3, 4 * NONE),
        (0, 4 * NONE),
        (8, LIMITS),
        (2, LIMITS + 3 * NONE),
        (2, LIMITS + 5 * NONE),
        (2, listed(1, rice(0, b"\0" * 7 + b"\1"), rice(0, b"\x80"))),
        (2, listed(2**32 - 1, rice(0, b"\xff"), rice(0, b"\xff"))),
        (2, listed(2, rice(0, b"\x80"), rice(0, b"\xc0"))),
        (2, listed(1, rice(0, b"\xc0"), rice(0, b"\x80"))),
        (2, listed(1, rice(9, b"\x80", b"\xff"), rice(0, b"\x80"))),
        (2, listed(1, rice(100, b"\x80", b"\xff" * 13), rice(0, b"\x80"))),
        (2, listed(1, framed(b"\x80" + bytes(9)), rice(0, b"\x80"))),
        (2, listed(1, rice(128, b"\x80"), rice(0, b"\x80"))),
        (2, LIMITS + b"\1\xff\xff\xff\xff"),
    ],
)
def test_deltas_that_make_no_sense(width: int, rest: bytes) -> None:
    """Unknown widths, missing lists and bits, words beyond the chunk, more or fewer numbers than differences, frames
    that are none or hold more than the numbers need.
    """
    base = bytes(100)
    with pytest.raises(CorruptObject):
        decoded(bytes(16) + bytes([width]) + rest, base)
