from __future__ import annotations

from typing import Any

import pytest

from ckptstore.values import Record, Value


class Pair(Value):
    first: int
    second: int = 2


class NamedPair(Record):
    second: int = 2
    first: int


@pytest.mark.parametrize("pair", [Pair(1), NamedPair(first=1)])
def test_fields_do_not_change(pair: Any) -> None:
    with pytest.raises(AttributeError):
        pair.first = 3
    assert (pair.first, pair.second) == (1, 2)


def test_the_fields_of_a_record_are_given_by_name() -> None:
    record: Any = NamedPair
    with pytest.raises(TypeError):
        record(2, 1)
