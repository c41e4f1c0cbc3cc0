"""Searches for reference cycles rest while a state is restored."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckpt.restoring.pipeline import gc_paused
from ckptstore.errors import CorruptObject


@pytest.fixture(autouse=True)
def searches_go_on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@gc_paused()
def is_searching(fail: bool = False) -> bool:
    if fail:
        raise CorruptObject("damaged")
    return gc.isenabled()


def test_searches_rest_until_the_call_ends() -> None:
    assert [is_searching(), gc.isenabled(), is_searching()] == [False, True, False]


def test_searches_go_on_after_an_error() -> None:
    with pytest.raises(CorruptObject):
        is_searching(fail=True)
    assert gc.isenabled()


def test_searches_that_the_caller_stopped_stay_stopped() -> None:
    gc.disable()
    assert not is_searching()
    assert not gc.isenabled()
