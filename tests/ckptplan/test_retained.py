"""Stored bytes under retention rules, by counting."""

from __future__ import annotations

import pytest

from ckptplan.retained import retained
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, 1000),
        (Policy(keep_last=5), 5),
        (Policy(keep_every=1000), 10),
        (Policy(keep_last=5, keep_every=1000), 14),
        (Policy(keep_hourly=24), 17),
        (Policy(keep_within_s=600), 11),
        (Policy(keep_last=2, keep_best=("loss:min:3",)), 5),
        (Policy(keep_last=2, keep_best=("accuracy:max:3",)), 5),
    ],
)
def test_rules_are_those_that_prune(policy: Policy | None, kept: int) -> None:
    """1000 saves, one every ten steps of six seconds: 16.7 hours."""
    found = retained(policy, num_saves=1000, interval_s=60, step_s=6, stored_bytes=7, price=None)
    assert (found.num_kept, found.stored_bytes, found.price_per_month) == (kept, 7 * kept, None)


def test_the_price_is_per_gigabyte_and_month() -> None:
    found = retained(Policy(keep_last=5), 100, 60, 6, stored_bytes=1000 * 10**9, price=0.02)
    assert found.price_per_month == pytest.approx(5 * 1000 * 0.02)


def test_no_saves_cost_nothing() -> None:
    assert retained(Policy(keep_last=5), 0, 60, 6, 7, 1.0).stored_bytes == 0


def test_too_many_saves_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="--interval"):
        retained(Policy(keep_last=5), 1_000_000, 0.1, 6, 7, None)
