"""The compiled loops of float-split and those of numpy: the same bytes from both, and both read them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.codecs import float_split, fused, passes
from ckptstore.codecs.chunk_codecs import FLOAT_SPLIT, Coding
from ckptstore.codecs.dtypes import ITEM_BYTES, Extremes
from ckptstore.errors import CorruptObject
from ckptstore.format.documents import digest
from ckptstore.format.shards import encode_chunk
from tests.ckptstore.codecs.test_chunk_codecs import numbers

LOOPS: dict[str, Any] = {"compiled": fused, "numpy": passes}
every_type = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The library of this source: the installed one, or one that is built here."""
    with pytest.MonkeyPatch.context() as patch:
        if not fused.IS_BUILT:
            if (compiler := shutil.which("cc")) is None:
                pytest.skip("needs a C compiler")
            library = tmp_path_factory.mktemp("built") / "libfused.so.1"
            subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, fused.SOURCE], check=True)
            patch.setattr(fused, "_library", fused.load(library))
            patch.setattr(fused, "IS_BUILT", True)
        yield


def both(dtype: str, raw: memoryview, level: int = 1) -> bytes:
    """What both encode it to, after both have decoded it, and found the same extremes."""
    found: dict[str, tuple[bytes, Any]] = {}
    for name, loops in LOOPS.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(float_split, "loops", loops)
            extremes = Extremes(dtype)
            stored = bytes(float_split.encode(dtype, raw, level, extremes))
            found[name] = stored, (extremes.unsigned, extremes.signed, extremes.smallest)
            for other in (stored, b"x" + stored):  # at any address
                into = bytearray(len(raw) + 2)
                float_split.decode(dtype, memoryview(other)[len(other) - len(stored) :], memoryview(into)[1:-1])
                assert into[1:-1] == raw
    assert found["compiled"] == found["numpy"]
    return found["compiled"][0]


@every_type
@pytest.mark.parametrize("kind", ["one scale", "no signs", "zeros"])
def test_chunks_that_are_not_encoded_have_the_same_extremes(dtype: str, kind: str) -> None:
    raw = memoryview(as_bytes(dtype, numbers(kind)[:200_003]))
    found = []
    for loops, coding in ((fused, "raw"), (passes, "raw"), (passes, FLOAT_SPLIT[dtype])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(float_split, "loops", loops)
            extremes = Extremes(dtype)
            chunk = encode_chunk(raw, Coding(coding), extremes)
        found.append((extremes.unsigned, extremes.signed, extremes.smallest))
        if coding == "raw":
            assert chunk.digest == chunk.raw_digest == digest(raw)
    assert found[0] == found[1] == found[2]


def as_bytes(dtype: str, values: np.ndarray[Any, np.dtype[np.float32]]) -> bytes:
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    with np.errstate(over="ignore"):
        return values.astype(dtype).tobytes()


KINDS = ("one scale", "many scales", "no signs", "outliers", "untouched", "casts", "zeros", "one number")


@every_type
@pytest.mark.parametrize("kind", KINDS)
def test_what_training_leaves(dtype: str, kind: str) -> None:
    raw = as_bytes(dtype, numbers(kind)[:150_008])
    both(dtype, memoryview(raw))
    both(dtype, memoryview(raw)[: 40_000 * ITEM_BYTES[dtype]], level=9)


@every_type
def test_every_block_has_its_own_window(dtype: str) -> None:
    both(dtype, memoryview(as_bytes(dtype, np.concatenate([numbers(kind) for kind in KINDS]))))


@every_type
@given(
    exponents=st.lists(st.integers(-120, 120), min_size=1, max_size=4),
    words=st.integers(1, 700),
    escapes=st.lists(st.tuples(st.integers(0, 699), st.integers(0, (1 << 32) - 1)), max_size=6),
    signed=st.booleans(),
)
def test_any_window_and_escapes(
    dtype: str, exponents: list[int], words: int, escapes: list[tuple[int, int]], signed: bool
) -> None:
    """Blocks around the limits of escapes: 8 in 512 words of two halves, wherever they are."""
    random = np.random.default_rng(words)
    scale = np.exp2(np.resize(np.array(exponents, np.float32), 8 * words))
    values = (random.standard_normal(8 * words) * scale).astype(np.float32)
    bits = (values if signed else abs(values)).view(np.uint32)
    for place, word in escapes:
        bits[place * 8 * words // 700] = word
    both(dtype, memoryview(as_bytes(dtype, bits.view(np.float32))))


@pytest.mark.parametrize("escapes", [1, 127, 128, 129, 255, 256, 257, 4095])
@pytest.mark.parametrize("apart", [1, 4, 8, 33, 511])
def test_as_many_escapes_as_fit(escapes: int, apart: int) -> None:
    bits = (numbers("one scale").view(np.uint32) >> 16).astype(np.uint16)[: 1 << 17]
    bits[np.arange(escapes) * apart % len(bits)] = 7
    both("bfloat16", memoryview(bits.tobytes()))


@pytest.mark.parametrize("loops", LOOPS)
@given(data=st.data())
def test_damaged_blocks_write_nothing_outside(loops: str, data: st.DataObject) -> None:
    raw = as_bytes("float32", numbers("outliers")[:20_000])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(float_split, "loops", LOOPS[loops])
        stored = bytearray(float_split.encode("float32", memoryview(raw), 1))
        for _ in range(data.draw(st.integers(1, 4))):
            # Headers and escapes are where damage matters.
            at = data.draw(st.integers(0, 40) | st.integers(6 * 10_000, len(stored) - 1))
            stored[at] ^= data.draw(st.integers(1, 255))
        guarded = bytearray(b"\xa5" * (len(raw) + 128))
        with contextlib.suppress(CorruptObject):
            float_split.decode("float32", memoryview(stored), memoryview(guarded)[64:-64])
        assert guarded[:64] == guarded[-64:] == b"\xa5" * 64


_DATA = np.random.default_rng(1).bytes(600_000)
_sizes = st.integers(0, 5_000) | st.integers(1, 500).map(lambda blocks: 1024 * blocks) | st.integers(0, len(_DATA))


@given(size=_sizes, near=st.integers(-2, 2), offset=st.integers(0, 70), shift=st.integers(0, 9))
def test_what_is_read_is_hashed_and_ends_with_the_file(size: int, near: int, offset: int, shift: int) -> None:
    into = memoryview(bytearray(b"\xa5" * (max(0, size + near) + shift + 8)))
    part, want = into[shift : len(into) - 8], _DATA[offset:][: max(0, size + near)]
    with tempfile.TemporaryFile() as file:
        file.write(_DATA)
        file.flush()
        found = fused.read(file.fileno(), offset, part)
        whole = fused.read(file.fileno(), len(_DATA) - 300, memoryview(bytearray(500)))
    assert whole is not None
    assert whole[0] == 300
    if found is None:
        assert len(part) <= 240
    else:
        assert found[0] == len(want)
        assert part[: len(want)] == want
        assert len(want) < len(part) or found[1] == digest(part)
    assert into[:shift] == b"\xa5" * shift
    assert into[len(into) - 8 :] == b"\xa5" * 8


def test_a_read_that_fails_raises() -> None:
    with tempfile.TemporaryDirectory() as folder:
        fd = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(IsADirectoryError):
                fused.read(fd, 0, memoryview(bytearray(1000)))
        finally:
            os.close(fd)


@every_type
@pytest.mark.parametrize("size", [1, 120, 121, 128, 511, 512, 513, 131_072, 131_073])
def test_chunks_of_any_size_are_scanned_alike(dtype: str, size: int) -> None:
    words = np.frombuffer(as_bytes(dtype, numbers("outliers")[:size]), f"u{ITEM_BYTES[dtype]}")
    found = []
    for loops in LOOPS.values():
        extremes = Extremes(dtype)
        assert loops.scan(words, extremes) == digest(words.data)
        found.append((extremes.unsigned, extremes.signed, extremes.smallest))
    assert found[0] == found[1]


def test_the_code_for_other_processors_hashes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libfused.so.1"
    subprocess.run([compiler, "-O1", "-DANY_PROCESSOR", "-shared", "-fPIC", "-o", library, fused.SOURCE], check=True)
    monkeypatch.setattr(fused, "_library", fused.load(library))
    for size in (*range(122, 200), *range(500, 1100), 8192, 70_001):
        words = np.frombuffer(_DATA, np.uint16, size)
        assert fused.scan(words, Extremes("bfloat16")) == digest(words.data)


def test_a_library_that_is_absent_broken_or_without_one_of_the_functions_is_not_used(tmp_path: Path) -> None:
    library, source = tmp_path / "libfused.so.1", tmp_path / "other.c"
    assert fused.load(library) is None
    library.write_bytes(b"not a library")
    assert fused.load(library) is None
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    source.write_text("void ckpt_scan(void) {} void ckpt_split(void) {}")
    other = tmp_path / "other.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", other, source], check=True)
    assert fused.load(other) is None


def test_a_library_older_than_its_source_is_not_used(tmp_path: Path) -> None:
    if fused.LIBRARY.exists():
        copy = Path(shutil.copy(fused.LIBRARY, tmp_path))
        (tmp_path / "fused.c").write_text("")
        os.utime(copy, (0, 0))
        assert fused.load(copy) is None
