"""Calls for several items at the same time, such as reads of a store; and calls that signals do not interrupt.

Python runs signal handlers on the main thread, between any two bytecodes: an exception of a handler (KeyboardInterrupt,
or one's own) may leave what it interrupts half done, also in `threading.Event.wait`, which holds a lock of Python
code. So what the training thread shares with other threads is changed by a CallThread, and it waits by a Latch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_READERS = 16


def in_parallel(call: Callable[[_T], _R], items: Iterable[_T], threads: int = _READERS) -> list[_R]:
    """The results of a call for each item, in order. Raises the first error in that order, and begins no further calls.

    threads: as many calls at a time; by default the number of small reads that a store answers well.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ckpt-parallel") as pool:
        return list(pool.map(call, items))


def start_daemon(name: str, work: Callable[..., object], *args: Any) -> Thread:
    """A thread that does this work. The interpreter ends without it."""
    thread = Thread(target=work, args=args, name=name, daemon=True)
    thread.start()
    return thread


class Latch:
    """An event that is set once. An interrupted wait holds up no other thread. For any thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: dict[Any, None] = {}
        """A lock of each waiting thread, which it holds."""

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Wake all that wait, now and later."""
        self._is_set = True
        while self._waiting:
            try:
                self._waiting.popitem()[0].release()
            except KeyError:  # another thread was faster
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until it is set; returns whether it is."""
        if self._is_set:
            return True
        lock = Lock()
        lock.acquire()
        self._waiting[lock] = None
        try:
            if not self._is_set:  # after the lock is known: `set` may have come before
                lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            self._waiting.pop(lock, None)
        return self._is_set


class _Call:
    """A call that its caller waits for, until it has ended or has passed a point."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._claimed = Lock()
        self.ended = Latch()
        self.result: Any = None
        self.error: BaseException | None = None

    def claim(self) -> bool:
        """Decide whether the call is made or withdrawn: True for the first caller only."""
        return self._claimed.acquire(blocking=False)

    def __call__(self) -> None:
        if not self.claim():
            return
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error
        del self._work  # it may hold tensors
        self.ended.set()


class CallThread:
    """A thread that makes calls for the main thread, one after the other. It begins with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._serving = Lock()

    def run(self, work: Callable[..., _T], *args: Any, until: Latch | None = None) -> _T:
        """The result of `work` with these arguments, or its error.

        until: return when it is set, with `work` still under way; `work` sets it, also if it fails. An exception that
        interrupts this call is raised when `work` is done, or was not begun and never will be.
        """
        call = _Call(partial(work, *args))
        try:
            self._calls.put(call)
            self._serve_in_thread()
            (until or call.ended).wait()
        except BaseException:
            if not call.claim():
                (until or call.ended).wait()
            raise
        try:
            if call.error is not None:
                raise call.error
            result: _T = call.result
            return result
        finally:
            del call  # the error's traceback holds this frame

    def close(self) -> None:
        """End the thread when all calls are made. A later call begins another one."""
        self._calls.put(None)

    __del__ = close

    def _serve_in_thread(self) -> None:
        if not self._serving.locked():
            start_daemon(self._name, _serve, self._calls, self._serving)


def _serve(calls: SimpleQueue[_Call | None], serving: Lock) -> None:
    """Make calls until None comes. Only one thread does; holds no reference to the CallThread."""
    while serving.acquire(blocking=False):
        try:
            while (call := calls.get()) is not None:
                call()
                del call
        finally:
            serving.release()
        if calls.empty():
            return
