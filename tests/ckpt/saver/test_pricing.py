"""What a second of encoding costs training: where cores are free, where none is, and where only steps show it."""

from __future__ import annotations

import pytest

from ckpt.saver.pricing import FORGOTTEN_AFTER, Effort, Price

GB = 1_000_000_000
PLAIN = Effort(GB, wall_s=0.1, core_s=0.1, is_plain=True)
ENCODED = Effort(GB, wall_s=0.5, core_s=0.5, is_plain=False)


def learned(*saves: tuple[Effort, float | None]) -> float:
    price = Price()
    for effort, lost_s in saves:
        price.learn(effort, lost_s)
    return price.per_second


def test_a_free_core_and_steps_that_nobody_measured_cost_nothing() -> None:
    assert learned() == 0.0
    assert learned((PLAIN, None), (ENCODED, None)) == 0.0


def test_the_price_is_what_encoded_saves_lose_more_than_plain_ones() -> None:
    assert learned((PLAIN, 0.1), (ENCODED, 0.3)) == pytest.approx(0.2 / 0.4)
    assert learned((ENCODED, 0.3)) == pytest.approx(0.3 / 0.5), "without a plain save all of it counts"
    assert learned((PLAIN, 0.3), (ENCODED, 0.3)) == 0.0
    assert learned((PLAIN, 0.4), (ENCODED, 0.3)) == 0.0, "never negative"


def test_saves_of_any_size_count_alike() -> None:
    small = Effort(GB // 10, wall_s=0.05, core_s=0.05, is_plain=False)
    assert learned((PLAIN, 0.1), (small, 0.03)) == pytest.approx(learned((PLAIN, 0.1), (ENCODED, 0.3)))
    assert learned((Effort(0, 0.0, 0.0, True), 0.1)) == 0.0


def test_waiting_for_a_core_means_taking_one_from_others() -> None:
    waited = Effort(GB, wall_s=0.4, core_s=0.1, is_plain=True)
    assert learned(*[(waited, None)] * 9) == pytest.approx(0.25 * 0.75, rel=0.02)
    assert learned(*[(waited, None)] * 9, *[(PLAIN, None)] * 9) == pytest.approx(0.0, abs=0.01), "they are free again"


def test_what_encoding_cost_is_forgotten_after_many_saves_without() -> None:
    before = [(PLAIN, 0.1), (ENCODED, 0.3)]
    assert learned(*before, *[(PLAIN, 0.1)] * (FORGOTTEN_AFTER - 1)) == pytest.approx(0.5)
    assert learned(*before, *[(PLAIN, 0.1)] * FORGOTTEN_AFTER) == 0.0
