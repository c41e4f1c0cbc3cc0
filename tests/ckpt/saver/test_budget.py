"""The budget: what staging_bytes leaves each stage."""

from __future__ import annotations

import pytest

from ckpt.saver.budget import Budget
from ckpt.saver.encode import BUDGET_BYTES
from ckpt.saver.streaming import LEAST_BYTES

MIB = 1 << 20


@pytest.mark.parametrize("upload", [0, 96 * MIB])
@pytest.mark.parametrize("staging", [64 * MIB, 128 * MIB, 10 << 30])
def test_all_stages_together_hold_what_was_allowed(staging: int, upload: int) -> None:
    budget = Budget.of(staging, upload)
    assert budget.slot is not None
    assert budget.slot + budget.encoded + budget.upload == staging
    assert budget.slot > staging / 2
    assert budget.encoded <= BUDGET_BYTES
    assert budget.upload <= upload


def test_a_slot_has_room_for_a_stream_however_little_is_allowed() -> None:
    assert Budget.of(LEAST_BYTES, 96 * MIB).slot == LEAST_BYTES


def test_without_a_limit_stages_hold_what_is_fastest() -> None:
    assert Budget.of(None, 96 * MIB) == Budget(None, BUDGET_BYTES, 96 * MIB)
