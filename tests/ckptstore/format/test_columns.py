from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.format.columns import column, concatenate, distinct, pack, unpack


@given(st.lists(st.integers(0, 2**63 - 1) | st.integers(0, 300), max_size=20))
def test_columns_come_back(numbers: list[int]) -> None:
    text = pack(column(numbers))
    width, data = text.split(":")
    assert unpack(text).tolist() == numbers
    assert np.frombuffer(base64.b64decode(data), f"<{width}").tolist() == numbers
    assert concatenate([column(numbers), column(), column([1])]).tolist() == [*numbers, 1]


@given(st.lists(st.integers(0, 9) | st.integers(0, 2**63 - 1), max_size=20))
def test_distinct_numbers(numbers: list[int]) -> None:
    assert distinct(column(numbers)).tolist() == sorted(set(numbers))
    assert distinct(column(numbers).reshape(1, -1)).tolist() == sorted(set(numbers))


@pytest.mark.parametrize(
    ("top", "width"),
    [(0, 1), (255, 1), (256, 2), (2**16 - 1, 2), (2**16, 4), (2**32 - 1, 4), (2**32, 8), (2**63 - 1, 8)],
)
def test_the_smallest_width_is_taken(top: int, width: int) -> None:
    text = pack(column([0, top]))
    assert text.startswith(f"u{width}:")
    assert len(base64.b64decode(text[3:])) == 2 * width
    assert unpack(text).dtype == np.int64
    assert (pack(column()), unpack("u1:").tolist()) == ("u1:", [])


@pytest.mark.parametrize(
    "wrong",
    [None, 1, [], "", "u1", ":", "u3:AAAA", "i8:", "U1:", "u1:A", "u1:AAA", "u1:AA=A", "u1:A-_A", "u1:AAAA\n",
     "u1: AA==", "u2:AA==", "u8:AAAA", "u8://////////8=", "u1:AAAAé", "u1:AAAA====", "u1:AAAA=", "u1:AAAA=="],
)  # fmt: skip
def test_all_else_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(wrong)
