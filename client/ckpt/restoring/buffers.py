"""A few buffers that go round: filled, emptied by somebody who takes his time, and filled again. For any threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

_T = TypeVar("_T")


class CopyFence(Protocol):
    """A place in the work of whoever empties buffers."""

    def done(self) -> bool:
        """Whether all work before it is done."""

    def wait(self) -> None:
        """Return when it is. Raises what went wrong."""


class BufferPool(Generic[_T]):
    """At most `num_buffers`, made as they are needed. Who takes one gives it back, whatever happens."""

    def __init__(self, num_buffers: int, make: Callable[[], _T]) -> None:
        self._to_make = num_buffers
        self._make = make
        self._changed = threading.Condition()
        self._empty: list[_T] = []
        self._full: deque[tuple[_T, Sequence[CopyFence]]] = deque()

    def take(self) -> _T:
        """A buffer that nobody uses. If none is empty and none can be made, it waits for the one that was given first.

        Raises what making a buffer raised, or emptying it; then there is one less, until another is made in its place.
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
        """The buffer is empty at these fences."""
        with self._changed:
            if fences:
                self._full.append((buffer, fences))
            else:
                self._empty.append(buffer)
            self._changed.notify()

    def drain(self) -> None:
        """Return when all that were given back are empty. Raises what emptying one raised."""
        with self._changed:
            full, self._full = self._full, deque()
        for buffer, fences in full:
            for fence in fences:
                fence.wait()
            self.give(buffer, ())

    def _next(self) -> tuple[_T | None, Sequence[CopyFence]]:
        """A buffer, and what to wait for; None for one that is to be made."""
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
