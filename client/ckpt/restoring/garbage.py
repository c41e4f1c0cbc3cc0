"""Restoring without the interpreter's search for reference cycles, which looks at every object of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No search for cycles while a call lasts, in any thread; what is in no cycle is freed as ever.

    A restore makes objects for every tensor and chunk, and none of them is garbage before its end. As a decorator it
    also has them freed before the next search. Where searches were off already, they stay off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
