from __future__ import annotations

import numpy as np
import pytest
import torch

from ckptstore.codecs.dtypes import ITEM_BYTES, is_float, numbers_of

COMPONENTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
FLOATS = [dtype for dtype in ITEM_BYTES if is_float(dtype) and dtype not in COMPONENTS]


@pytest.mark.parametrize("dtype", FLOATS)
def test_words_decode_as_torch_decodes_them(dtype: str) -> None:
    size = ITEM_BYTES[dtype]
    words = np.arange(256 if size == 1 else 1 << 16, dtype=f"u{size}") << (8 * size - (8 if size == 1 else 16))
    raw = words.astype(f"u{size}").tobytes()
    expected = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)).to(torch.float64).numpy()
    with np.errstate(invalid="ignore"):
        assert np.array_equal(numbers_of(dtype, memoryview(raw)).astype(np.float64), expected, equal_nan=True)


def test_complex_numbers_are_two_numbers_and_integers_are_no_floats() -> None:
    raw = np.array([1 - 2j, 3j]).data.cast("B")
    assert numbers_of("complex128", raw).tolist() == [1, -2, 0, 3]
    assert numbers_of("bool", memoryview(b"\0\1")).tolist() == [0, 1]
    assert [is_float(dtype) for dtype in ("complex32", "bfloat16", "int8", "bool")] == [True, True, False, False]
