"""Calls that may never return, such as those of the key-value store of a job: a thread makes them, and the caller
waits only for a while.

Meetings of ranks make many short calls: their threads are used again, and end when they have been idle for a while.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

_IDLE_S = 0.5

_T = TypeVar("_T")
_Call = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class _Caller:
    """A daemon thread that makes one call at a time."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ckpt-meeting", daemon=True).start()

    def make(self, call: Callable[..., _T], arguments: tuple[Any, ...]) -> Future[_T]:
        """Begin a call, after those that were begun before."""
        answer: Future[_T] = Future()
        self._calls.put((answer, call, arguments))
        return answer

    def _run(self) -> None:
        while (made := self._next()) is not None:
            answer, call, arguments = made
            try:
                result = call(*arguments)
            except Exception as error:
                self._end(partial(answer.set_exception, error))
            else:
                self._end(partial(answer.set_result, result))
            made = answer = call = arguments = result = None  # type: ignore[assignment]  # must not live until the next

    def _next(self) -> _Call | None:
        while True:
            try:
                return self._calls.get(timeout=_IDLE_S)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return None

    def _end(self, answer: Callable[[], None]) -> None:
        """Idle before the caller continues: its next call is made here."""
        with _lock:
            _idle.append(self)
        answer()


_lock = threading.Lock()
_idle: list[_Caller] = []


def answer_within(seconds: float, call: Callable[..., _T], *arguments: Any) -> _T:
    """What the call returns or raises. Raises TimeoutError after this time; the call goes on in its thread."""
    with _lock:
        caller = _idle.pop() if _idle else None
    return (caller or _Caller()).make(call, arguments).result(seconds)


def _after_fork() -> None:
    """A child has none of its parent's threads, and the lock may have been held."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_after_fork)
