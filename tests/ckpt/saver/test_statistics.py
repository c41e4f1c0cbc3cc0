"""Statistics of chunks against the numbers themselves, for every element type and for hostile values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ckpt.saver.statistics import WHOLE, chunk_extremes, sample_chunk, tabulate
from ckptstore.codecs.chunk_codecs import encode, fast, smallest
from ckptstore.codecs.dtypes import COMPONENTS, FLOATS, ITEM_BYTES, decode_words, number_type, words_of
from ckptstore.format.statistics import Table, merge

FLOAT_TYPES = [name for name in FLOATS if name != "float8_e8m0fnu"]
Words = npt.NDArray[Any]


def of(dtype: str, raw: bytes | bytearray | memoryview, sizes: Sequence[int], level: int = 1) -> Table:
    extremes = chunk_extremes(dtype, sizes)
    encode(fast(dtype).codec, memoryview(raw), level, extremes)
    return tabulate(dtype, [sample_chunk(dtype, memoryview(raw), sizes, extremes)])


def truth(dtype: str, raw: bytes | memoryview) -> Any:
    kind = getattr(torch, number_type(dtype))
    return torch.frombuffer(bytearray(raw), dtype=kind).to(torch.float64).numpy()


def check_exact(table: Table, row: int, numbers: Any) -> None:
    finite = numbers[np.isfinite(numbers)]
    assert table.elements[row] == len(numbers)
    assert table.nan[row] == np.isnan(numbers).sum()
    assert table.positive_inf[row] == (numbers == np.inf).sum()
    assert table.negative_inf[row] == (numbers == -np.inf).sum()
    extremes = [finite.min(), finite.max()] if len(finite) else [np.nan, np.nan]
    assert np.array_equal([table.minimum[row], table.maximum[row]], extremes, equal_nan=True)


@pytest.mark.parametrize("dtype", [*FLOAT_TYPES, "float8_e8m0fnu"])
def test_words_decode_as_torch_decodes_them(dtype: str) -> None:
    size = ITEM_BYTES[dtype]
    words = np.arange(256 if size == 1 else 1 << 16, dtype=FLOATS[dtype].word) * (1 << max(0, 8 * size - 16))
    raw = words.astype(FLOATS[dtype].word).data.cast("B")
    assert np.array_equal(decode_words(dtype, words_of(dtype, raw)), truth(dtype, raw), equal_nan=True)


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_all_bit_patterns_in_slices_of_all_sizes(dtype: str) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 2, 3, 7, 64, 1000, WHOLE, WHOLE + 1, 5000]
    raw = rng.integers(0, 2 if dtype == "bool" else 256, sum(sizes) * ITEM_BYTES[dtype], dtype=np.uint8).tobytes()
    table = of(dtype, raw, sizes)
    numbers = truth(dtype, raw)
    parts = 2 if dtype in COMPONENTS else 1
    ends = np.cumsum(sizes) * parts
    for row, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        check_exact(table, row, numbers[begin:end])
        if end - begin <= WHOLE:
            check_moments(table, row, numbers[begin:end])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("cuts", [1, 3, 8])
def test_the_chunks_of_a_slice_share_its_sample(dtype: str, cuts: int) -> None:
    numbers = torch.randn(1 << 18, generator=torch.Generator().manual_seed(cuts)) * 1000
    raw = numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().data
    size = len(raw) // cuts // 64 * 64
    chunks = []
    for at in range(0, cuts * size, size):
        part, sizes = raw[at : at + size], (size // ITEM_BYTES[dtype],)
        extremes = chunk_extremes(dtype, sizes, of=len(numbers))
        encode("raw", part, 1, extremes)
        chunks.append(sample_chunk(dtype, part, sizes, extremes, of=len(numbers)))
    table = merge(tabulate(dtype, chunks), np.zeros(cuts, np.int64), 1)
    assert WHOLE - 32 * cuts <= table.sampled[0] <= WHOLE
    assert table.rms[0] == pytest.approx(1000, rel=0.12)


def check_moments(table: Table, row: int, numbers: Any) -> None:
    finite = numbers[np.isfinite(numbers)]
    assert table.sampled[row] == len(numbers)
    assert table.zeros[row] == (numbers == 0).sum()
    largest = np.abs(finite).max() if len(finite) else np.nan
    scale = largest if largest > 0 else 1.0
    expected = [(finite / scale).mean(), np.sqrt(np.square(finite / scale).mean())] if len(finite) else [np.nan] * 2
    found = np.array([table.mean[row], table.rms[row]]) / scale
    assert np.allclose(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def place(words: Words, bits: Sequence[int], places: Sequence[int]) -> None:
    words[list(places)] = np.array(bits, words.dtype)


@pytest.mark.parametrize("level", [1, smallest("float32").level])
@pytest.mark.parametrize("sign", ["both", "positive", "negative", "zero"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_extremes_that_the_encoder_finds_are_exact(dtype: str, sign: str, level: int) -> None:
    rng = np.random.default_rng(1)
    count = 300_003  # several blocks, and words after the last one
    numbers = torch.from_numpy(rng.standard_normal(count) * 1e-3)
    numbers = {"both": numbers, "positive": numbers**2, "negative": -(numbers**2), "zero": numbers * -0.0}[sign]
    words = numbers.to(getattr(torch, dtype)).view(torch.uint8).numpy().view(FLOATS[dtype].word).copy()
    layout = FLOATS[dtype]
    infinity = layout.infinity
    assert infinity is not None
    top = layout.word.type(infinity)
    for changed in (
        {},
        {count - 1: 0},
        {count - 1: layout.last},
        {0: layout.last | layout.sign, 200_000: layout.last},
        {17: layout.sign},
        {150_000: infinity},
        {150_000: infinity | layout.sign, 3: infinity | layout.sign},
        {count - 2: infinity + 1},
        {299_999: infinity + 1 | layout.sign, 5: (1 << (8 * layout.word.itemsize)) - 1},
    ):
        given = words.copy()
        place(given, list(changed.values()), list(changed))
        raw = given.data.cast("B")
        check_exact(of(dtype, raw, (count,), level), 0, truth(dtype, raw))
    for bits in (top, top + 1, layout.last, layout.sign):  # nothing else
        raw = np.full(70_000, bits, layout.word).data.cast("B")
        check_exact(of(dtype, raw, (70_000,), level), 0, truth(dtype, raw))


def test_large_slices_are_sampled_evenly() -> None:
    rng = np.random.default_rng(2)
    numbers = (rng.standard_normal(1 << 21) * 0.5 + 0.25).astype(np.float32)
    numbers[rng.random(1 << 21) < 0.3] = 0
    table = of("float32", numbers.data.cast("B"), (len(numbers),))
    assert table.sampled[0] < len(numbers) / 100
    wide = numbers.astype(np.float64)
    assert table.mean[0] == pytest.approx(wide.mean(), abs=0.05)
    assert table.rms[0] == pytest.approx(np.sqrt((wide**2).mean()), rel=0.05)
    assert table.zeros[0] / len(numbers) == pytest.approx(0.3, abs=0.05)
    buckets = dict(zip(table.exponent.tolist(), table.count.tolist(), strict=True))
    assert sum(buckets.values()) == pytest.approx(len(numbers))
    assert buckets[0] / len(numbers) == pytest.approx(0.3, abs=0.05)
    quarter_to_half = ((np.abs(wide) >= 0.25) & (np.abs(wide) < 0.5)).mean()
    assert buckets[127 - 2] / len(numbers) == pytest.approx(quarter_to_half, abs=0.05)


def test_merging_does_not_depend_on_how_a_tensor_was_cut() -> None:
    rng = np.random.default_rng(3)
    numbers = (rng.standard_normal(600) * 10.0 ** rng.integers(-12, 12, 600)).astype(np.float64)
    numbers[[3, 77, 500]] = np.nan, np.inf, -np.inf
    numbers[100:140] = 0
    numbers[150] = 1e308  # its square is no number
    whole = of("float64", numbers.data.cast("B"), (600,))
    check_exact(whole, 0, numbers)
    check_moments(whole, 0, numbers)
    for _ in range(50):
        cuts = np.sort(rng.choice(np.arange(1, 600), rng.integers(1, 20), replace=False))
        sizes = np.diff([0, *cuts, 600]).tolist()
        merged = merge(of("float64", numbers.data.cast("B"), sizes), np.zeros(len(sizes), np.int64), 1)
        check_exact(merged, 0, numbers)
        check_moments(merged, 0, numbers)
        assert np.array_equal(merged.exponent, whole.exponent)
        assert np.array_equal(merged.count, whole.count)
        left_out = merge(of("float64", numbers.data.cast("B"), sizes), np.full(len(sizes), -1), 2)
        assert left_out.elements.tolist() == [0, 0]


def test_only_zeros_and_negative_infinities_are_a_mask() -> None:
    inf, nan = np.inf, np.nan
    rows = [[0, -inf, -inf], [-inf, -inf, -inf], [0, 0, 0], [0, inf, 0], [1, -inf, 0], [0, -inf, nan], [inf, inf, inf]]
    table = of("float32", np.array(rows, np.float32).data.cast("B"), [3] * len(rows))
    assert table.not_finite.tolist() == [False, False, False, True, True, True, True]
