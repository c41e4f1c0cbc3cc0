"""Calls in threads that are used again; one that hangs delays no other."""

from __future__ import annotations

import os
import threading
import warnings

import pytest

from ckpt.ranks.asking import answer_within
from tests.support.waiting import wait_until

_LONG_S = 60.0


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpt-meeting"]


def _fail() -> None:
    raise KeyError("lost")


def test_a_thread_is_used_again_and_ends_when_it_is_idle() -> None:
    first = answer_within(_LONG_S, threading.get_ident)
    with pytest.raises(KeyError, match="lost"):
        answer_within(_LONG_S, _fail)
    assert answer_within(_LONG_S, threading.get_ident) == first != threading.get_ident()
    wait_until(lambda: not _threads(), "the end of idle threads")


def test_a_call_that_hangs_delays_no_other_and_its_thread_ends_after_it() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        answer_within(0.01, end.wait)
    assert answer_within(_LONG_S, int, "7") == 7
    end.set()
    wait_until(lambda: not _threads(), "the end of idle threads")


def test_threads_of_a_parent_are_not_used_by_its_child() -> None:
    answer_within(_LONG_S, int, "7")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
        child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if answer_within(_LONG_S, int, "7") == 7 else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
