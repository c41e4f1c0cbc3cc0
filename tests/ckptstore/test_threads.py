"""Calls that an exception of a signal handler interrupts are made as a whole or not at all; latches hang nobody."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from ckptstore.threads import CallThread, Latch


def test_calls_are_made_one_after_the_other_on_one_thread_and_end_with_it() -> None:
    calls = CallThread("calls")
    idents = {calls.run(threading.get_ident) for _ in range(5)}
    assert len(idents) == 1
    assert threading.get_ident() not in idents
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    passed, end = Latch(), Latch()

    def go_on() -> None:
        passed.set()
        assert end.wait(60)

    calls.run(go_on, until=passed)
    end.set()
    calls.close()
    assert calls.run(lambda: 7) == 7
    calls.close()


def test_an_interrupted_call_is_complete_when_the_exception_arrives() -> None:
    calls, done = CallThread("calls"), list[int]()

    def interrupted() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        Latch().wait(0.1)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        calls.run(interrupted)
    assert done == [1]
    calls.close()


def test_a_call_that_was_not_begun_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, done = CallThread("calls"), list[int]()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CallThread, "_serve_in_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            calls.run(lambda: done.append(1))
    assert calls.run(lambda: done) == []
    calls.close()


def test_a_latch_wakes_all_that_wait_also_after_an_interrupted_wait() -> None:
    latch = Latch()
    assert not latch.wait(0.01)
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        latch.wait(60)
    timer.join()
    others = [threading.Thread(target=latch.wait) for _ in range(3)]
    for other in others:
        other.start()
    latch.set()
    for other in others:
        other.join()
    assert latch.is_set()
