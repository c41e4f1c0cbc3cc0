"""Chunk codecs give back every bit, refuse garbage with CorruptObject alone, and are as small as promised."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from ckptstore.codecs.chunk_codecs import CODECS, FLOAT_SPLIT, RAW, ZSTD, decode, encode, fast
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import CorruptObject

ITEM = {RAW: 1, ZSTD: 1, **{codec: ITEM_BYTES[dtype] for dtype, codec in FLOAT_SPLIT.items()}}
every_codec = pytest.mark.parametrize("codec", CODECS)


def encoded(codec: str, raw: bytes, level: int = 1) -> tuple[str, bytes]:
    used, stored = encode(codec, memoryview(raw), level)
    return used, bytes(stored)


def decoded(codec: str, stored: bytes, size: int) -> bytes:
    """Decode into the middle of a larger buffer, whose rest must stay as it was."""
    guard = b"\xa5" * 64
    buffer = bytearray(guard + bytes(size) + guard)
    decode(codec, memoryview(stored), memoryview(buffer)[64 : 64 + size])
    assert buffer[:64] == guard
    assert buffer[64 + size :] == guard
    return bytes(buffer[64 : 64 + size])


@every_codec
@given(data=st.data())
def test_any_bytes_come_back(codec: str, data: st.DataObject) -> None:
    raw = data.draw(st.binary(max_size=600).map(lambda b: b[: len(b) // ITEM[codec] * ITEM[codec]]))
    repeated = raw * data.draw(st.integers(1, 40))
    used, stored = encoded(codec, repeated)
    assert used in (codec, RAW)
    assert len(stored) <= len(repeated)
    assert decoded(used, stored, len(repeated)) == repeated


@every_codec
@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize("elements", [0, 1, 2, 7, 8, 9, 65_536, 131_071, 131_072, 131_073, 131_080, 262_152, 300_001])
def test_block_boundaries(codec: str, elements: int, level: int) -> None:
    weights = (np.random.default_rng(elements).standard_normal(elements) * 0.02).astype(np.float32)
    raw = weights.tobytes()[: elements * ITEM[codec]]
    used, stored = encoded(codec, raw, level)
    assert decoded(used, stored, len(raw)) == raw
    if elements >= 65_535 and codec in FLOAT_SPLIT.values():
        assert used == codec or codec != "float-split/float32", "the codec itself must have been tested"


SPECIAL = {
    "float32": [0x7FC00001, 0xFFFFFFFF, 0x7F800001, 0x80000000, 0, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x3F800000],
    "bfloat16": [0x7FC1, 0xFFFF, 0x7F81, 0x8000, 0, 1, 0x807F, 0x7F80, 0xFF80, 0x3F80],
    "float16": [0x7E01, 0xFFFF, 0x7C01, 0x8000, 0, 1, 0x83FF, 0x7C00, 0xFC00, 0x3C00],
}
"""NaNs with payloads, quiet and signalling; both zeros; denormals; both infinities; one."""


@pytest.mark.parametrize("dtype", SPECIAL)
def test_special_numbers_and_every_16_bit_pattern_keep_their_bits(dtype: str) -> None:
    special = np.array(SPECIAL[dtype] * 500, dtype=np.uint32 if dtype == "float32" else np.uint16)
    every = [np.repeat(np.arange(1 << 16, dtype=np.uint16), 9)] if dtype != "float32" else []
    for words in (special, *every):  # repeated, so that they are worth encoding
        used, stored = encoded(FLOAT_SPLIT[dtype], words.tobytes())
        assert (used, decoded(used, stored, words.nbytes)) == (FLOAT_SPLIT[dtype], words.tobytes())


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0.835), ("bfloat16", 0.67), ("float16", 0.95)])
def test_trained_weights_shrink(dtype: str, limit: float) -> None:
    weights = (np.random.default_rng(0).standard_normal(1 << 20) * 0.02).astype(np.float32)
    raw = {
        "float32": weights.tobytes(),
        "bfloat16": (weights.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "float16": weights.astype(np.float16).tobytes(),
    }[dtype]
    used, stored = encoded(fast(dtype).codec, raw)
    assert used == FLOAT_SPLIT[dtype]
    assert len(stored) <= limit * len(raw)


def test_noise_is_stored_raw() -> None:
    noise = np.random.default_rng(0).bytes(1 << 20)
    for codec in CODECS:
        used, stored = encoded(codec, noise)
        assert len(stored) <= len(noise)
        assert decoded(used, stored, len(noise)) == noise


@every_codec
@given(stored=st.binary(max_size=300), size=st.integers(0, 5000))
@example(stored=b"", size=0)
@example(stored=b"\0\0\0\0", size=0)
def test_garbage_raises_corrupt_object_only(codec: str, stored: bytes, size: int) -> None:
    with contextlib.suppress(CorruptObject):
        decoded(codec, stored, size)


@every_codec
@given(data=st.data())
def test_damaged_chunks_raise_corrupt_object_or_give_other_bytes(codec: str, data: st.DataObject) -> None:
    """The checksum has caught these before; the decoder must still be safe with them."""
    words = np.repeat(np.arange(300, dtype=np.uint32) << 16, 4)
    used, stored = encoded(codec, words.tobytes())
    damaged = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), bytes(damaged[:cut]), stored + b"more"):
        try:
            decoded(used, candidate, words.nbytes)
        except CorruptObject:
            continue
        assert candidate[: len(stored)] == bytes(damaged), "what is too short or too long must be refused"


def sized_planes(frame: bytes, sizes: tuple[int, ...]) -> bytes:
    planes = [frame if size else bytes(raw) for size, raw in zip(sizes, (2 * 96, 96, 96), strict=True)]
    return b"".join(plane + bytes(-len(plane) % 8) for plane in planes)


def test_frames_that_lie_about_their_size() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(512 << 20))
    skippable = struct.pack("<II", 0x184D2A50, 100) + bytes(100)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    tracemalloc.start()
    try:
        for frame in (bomb, skippable, unsized):
            with pytest.raises(CorruptObject):
                decoded(ZSTD, frame, 100)
            for sizes in ((len(frame), 0, 0), (0, len(frame), 0), (0, 0, len(frame))):
                block = struct.pack("<IIIIHBBxxxx", 96, *sizes, 0, 0, 0)
                with pytest.raises(CorruptObject, match="zstd frame"):
                    decoded("float-split/float32", block + sized_planes(frame, sizes), 4 * 96)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20, "the bomb was unpacked"
    finally:
        tracemalloc.stop()


def numbers(kind: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What training leaves: of one scale, of many, without signs, with outliers, never touched, casts."""
    normal = np.random.default_rng(1).standard_normal(1 << 18).astype(np.float32)
    scales = np.exp2(np.arange(1 << 18) // 4096 % 60).astype(np.float32) * np.float32(2**-50)
    outliers = np.where(np.arange(1 << 18) % 3001 == 0, np.float32(1e-30), np.float32(1)).astype(np.float32)
    touched = (np.arange(1 << 18) // 1000 % 3 == 0).astype(np.float32)
    found: dict[str, Any] = {
        "one scale": normal, "many scales": normal * scales, "no signs": normal * normal, "outliers": normal * outliers,
        "untouched": normal * touched, "casts": (normal.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        "zeros": np.zeros_like(normal), "one number": np.ones_like(normal),
    }  # fmt: skip
    return cast("np.ndarray[Any, np.dtype[np.float32]]", found[kind])


@pytest.mark.parametrize("dtype", FLOAT_SPLIT)
@pytest.mark.parametrize(
    ("kind", "limit"),
    [("one scale", 0.84), ("many scales", 0.92), ("no signs", 0.84), ("outliers", 0.84), ("untouched", 0.40),
     ("casts", 0.4), ("zeros", 0.001), ("one number", 0.001)],
)  # fmt: skip
def test_all_that_training_leaves_comes_back_and_is_small(dtype: str, kind: str, limit: float) -> None:
    values = numbers(kind)
    bits = values.view(np.uint32) >> 16
    halves: dict[str, Any] = {"bfloat16": bits.astype(np.uint16), "float16": values.astype(np.float16)}
    raw = halves.get(dtype, values).tobytes()
    used, stored = encoded(FLOAT_SPLIT[dtype], raw)
    smallest, stored_smallest = encoded(FLOAT_SPLIT[dtype], raw, level=9)
    assert decoded(used, stored, len(raw)) == decoded(smallest, stored_smallest, len(raw)) == raw
    assert len(stored_smallest) <= len(stored) * 1.001
    if dtype == "float32":
        assert len(stored) <= limit * len(raw)


def test_every_block_has_its_own_mode() -> None:
    values = np.concatenate([numbers(kind) for kind in ("no signs", "many scales", "outliers", "zeros", "one scale")])
    for level in (1, 9):
        used, stored = encoded("float-split/float32", values.tobytes(), level)
        assert decoded(used, stored, values.nbytes) == values.tobytes()


def test_equal_bytes_are_encoded_alike_whatever_came_before() -> None:
    alone = encoded("float-split/float32", numbers("one scale").tobytes())
    encoded("float-split/float32", numbers("many scales").tobytes())
    assert encoded("float-split/float32", numbers("one scale").tobytes()) == alone


def test_chunks_at_odd_addresses_are_decoded() -> None:
    raw = numbers("outliers").tobytes()
    used, stored = encoded("float-split/float32", raw)
    shifted, into = memoryview(b"x" + stored)[1:], memoryview(bytearray(len(raw) + 3))[3:]
    decode(used, shifted, into)
    assert into == raw


def test_threads_do_not_share_scratch_memory() -> None:
    raws = [numbers(kind).tobytes() for kind in ("one scale", "no signs", "outliers", "untouched")] * 3

    def there_and_back(raw: bytes) -> bytes:
        used, stored = encoded("float-split/float32", raw)
        return decoded(used, stored, len(raw))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(there_and_back, raws)) == raws


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((0, 0, 0, 0, 0, 0, 0), "block of 0 words"), ((8, 0, 0, 0, 0, 0, 0), "block of 8 words"),
        ((60_001, 0, 0, 0, 0, 0, 0), "block of 60001 words"), ((70_000, 0, 0, 0, 0, 0, 0), "block of 70000 words"),
        ((65_536, 0, 0, 0, 0, 0, 4), "mode 4"), ((65_536, 0, 0, 0, 1, 0, 1), "escape outside"),
        ((65_536, 1 << 31, 0, 0, 0, 0, 0), "ends early"),
    ],
)  # fmt: skip
def test_headers_that_lie(header: tuple[int, ...], message: str) -> None:
    stored = struct.pack("<IIIIHBBxxxx", *header) + b"\xff" * (4 << 16)
    with pytest.raises(CorruptObject, match=message):
        decoded("float-split/float32", stored, 4 << 16)


@pytest.mark.parametrize("codec", ["", "gzip", "float-split/float64"])
def test_unknown_codecs_are_refused(codec: str) -> None:
    with pytest.raises(CorruptObject, match="unknown"):
        decode(codec, memoryview(b"x"), memoryview(bytearray(1)))
