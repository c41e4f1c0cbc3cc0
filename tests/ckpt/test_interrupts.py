"""Exceptions of signal handlers at any line of a save, a restore, a step or a close lose and mix nothing."""

from __future__ import annotations

import inspect
import json
import os

import pytest

from ckpt.snapshot import guard
from tests.ckpt.interrupted import Alarm, Interruption
from tests.support.forking import TRAINER, run

_EVERY = 1 if os.environ.get("CKPTD_INTERRUPTS") == "all" else 400


def test_an_exception_at_any_line_leaves_what_is_committed_as_it_was_at_the_call() -> None:
    code, printed, errors = run(TRAINER, "tests.ckpt.interrupted", ["0", str(_EVERY)], end_s=100_000 / _EVERY)
    assert code == 0, errors
    found = json.loads(printed)
    assert found["raised"] > 30
    assert found["findings"] == []


@pytest.mark.parametrize("error", [Alarm, MemoryError])
def test_a_check_of_the_device_ends_with_what_a_signal_handler_raises(error: type[BaseException]) -> None:
    with pytest.raises(error), guard._OnlyWarns("samples"):
        raise error


def test_an_exception_at_the_entry_of_a_check_of_the_device_keeps_its_type() -> None:
    _, first = inspect.getsourcelines(guard._OnlyWarns.__enter__)
    raised = Interruption(Alarm, ("", "ckpt/snapshot/guard.py", first + 1))
    with pytest.raises(Alarm), raised, guard._OnlyWarns("samples"):
        pass
