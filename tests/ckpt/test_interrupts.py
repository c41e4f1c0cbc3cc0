"""Exceptions of signal handlers at any line of a save, a restore, a step or a close lose and mix nothing."""

from __future__ import annotations

import json
import os

from tests.support.forking import TRAINER, run

_EVERY = 1 if os.environ.get("CKPTD_INTERRUPTS") == "all" else 400


def test_an_exception_at_any_line_leaves_what_is_committed_as_it_was_at_the_call() -> None:
    code, printed, errors = run(TRAINER, "tests.ckpt.interrupted", ["0", str(_EVERY)], end_s=100_000 / _EVERY)
    assert code == 0, errors
    found = json.loads(printed)
    assert found["raised"] > 30
    assert found["findings"] == []
