"""Calls for several items at the same time, such as reads of a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_READERS = 16


def in_parallel(call: Callable[[_T], _R], items: Iterable[_T], threads: int = _READERS) -> list[_R]:
    """The results of a call for each item, in order. Raises the first error in that order, and begins no further calls.

    threads: as many calls at a time; by default the number of small reads that a store answers well.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-parallel") as pool:
        return list(pool.map(call, items))
