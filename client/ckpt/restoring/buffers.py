"""A pool of a few reused buffers: filled, emptied asynchronously, and filled again. Thread-safe."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")


class CopyFence(Protocol):
    """A point in the work queue of the consumer that empties buffers."""

    def done(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Return when all work before it is done. Raises the error of that work."""


class BufferPool(Generic[_T]):
    """At most `num_buffers` buffers, made on demand. The caller must give each one back, also after an error."""

    def __init__(self, num_buffers: int, make: Callable[[], _T]) -> None:
        self._to_make = num_buffers
        self._make = make
        self._changed = threading.Condition()
        self._empty: list[_T] = []
        self._full: deque[tuple[_T, Sequence[CopyFence]]] = deque()

    def take(self) -> _T:
        """An unused buffer. If none is empty and none can be made, waits for the one that was given back first.

        Raises the error of making or emptying a buffer. That buffer is dropped, and a later call makes another.
        """
        buffer, fences = self._next()
        try:
            for fence in fences:
                fence.wait()
            return self._make() if buffer is None else buffer
        except BaseException:
            with self._changed:
                self._to_make += 1
                self._changed.notify()
            raise

    def give(self, buffer: _T, fences: Sequence[CopyFence]) -> None:
        """Give a buffer back; it is empty once these fences are done."""
        with self._changed:
            if fences:
                self._full.append((buffer, fences))
            else:
                self._empty.append(buffer)
            self._changed.notify()

    def drain(self) -> None:
        """Return when all buffers that were given back are empty. Raises the error of emptying one."""
        with self._changed:
            full, self._full = self._full, deque()
        for buffer, fences in full:
            for fence in fences:
                fence.wait()
            self.give(buffer, ())

    def _next(self) -> tuple[_T | None, Sequence[CopyFence]]:
        """A buffer and the fences to wait for; None if the caller must make one."""
        with self._changed:
            while True:
                if self._empty:
                    return self._empty.pop(), ()
                if self._full and (not self._to_make or all(fence.done() for fence in self._full[0][1])):
                    return self._full.popleft()
                if self._to_make:
                    self._to_make -= 1
                    return None, ()
                self._changed.wait()
