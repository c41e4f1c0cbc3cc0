"""Deltas give back every bit of the chunk, and refuse garbage and other bases with CorruptObject alone."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
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


@pytest.mark.parametrize(("share", "limit"), [(0.0, 0.0004), (0.001, 0.002), (0.05, 0.02), (1.0, 0.26)])
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


def planes(*found: bytes) -> bytes:
    frames = [zstandard.compress(plane) for plane in found]
    return b"\xff" + b"".join(struct.pack("<I", len(packed)) + packed for packed in frames)


def rice(low: int, unary: bytes, rest: bytes = b"") -> bytes:
    return bytes([low]) + struct.pack("<I", len(unary)) + unary + rest


@pytest.mark.parametrize(
    ("width", "count", "rest"),
    [
        (3, 0, b""),
        (0, 0, b""),
        (8, 0, b""),
        (2, 1, planes(*[b"\xff"] * 4) + planes(b"\1", b"\1")),
        (2, 1, planes(*[b"\0"] * 3)),
        (2, 2**32 - 1, planes(*[b"\0" * 9] * 2)),
        (2, 0, planes(*[b""] * 4) + planes(b"", b"") + b"more"),
        (2, 2, rice(0, b"\x80") + rice(0, b"\xc0")),
        (2, 1, rice(0, b"\xc0") + rice(0, b"\x80")),
        (2, 1, rice(0, b"\0" * 7 + b"\1") + rice(0, b"\x80")),
        (2, 1, rice(9, b"\x80", b"\xff") + rice(0, b"\x80")),
        (2, 1, rice(200, b"\x80", b"\xff" * 25) + rice(0, b"\x80")),
        (2, 1, b"\1\xff\xff\xff\xff"),
    ],
)
def test_deltas_that_make_no_sense(width: int, count: int, rest: bytes) -> None:
    """Unknown widths, words beyond the chunk, missing planes and bits, more or fewer numbers than differences."""
    base = bytes(100)
    with pytest.raises(CorruptObject):
        decoded(bytes(16) + struct.pack("<II", width, count) + rest, base)
