"""Steps and training time, by worked examples."""

from __future__ import annotations

import pytest

from ckptplan.work import global_batch, num_steps, training_time
from ckptstore.errors import InvalidRequest


def test_a_thousand_samples_in_batches_of_ten_are_a_hundred_steps() -> None:
    assert num_steps(1000, 10) == 100


def test_two_micro_batches_of_five_are_a_batch_of_ten() -> None:
    assert global_batch(accumulation=2, processes=1, micro_batch=5) == 10
    assert num_steps(1000, global_batch(2, 1, 5)) == 100
    assert global_batch(accumulation=4, processes=2 * 8, micro_batch=3) == 192


def test_epochs_and_incomplete_batches() -> None:
    assert num_steps(1001, 10) == 101
    assert num_steps(1001, 10, epochs=3) == 303
    assert num_steps(1000, 10, epochs=2.5) == 250


@pytest.mark.parametrize("wrong", [(0, 10, 1), (10, 0, 1), (10, 1, 0)])
def test_nothing_to_do_is_refused(wrong: tuple[int, int, float]) -> None:
    with pytest.raises(InvalidRequest):
        num_steps(*wrong)
    with pytest.raises(InvalidRequest):
        global_batch(0, 1, 1)


def test_time_without_and_with_failures() -> None:
    found = training_time(steps=1000, step_s=10, interval_s=500, cost_s=5, mtbf_s=2000, restart_s=60, durable_s=40)
    assert (found.productive_s, found.saving_s, found.num_saves) == (10_000, 100, 20)
    assert found.without_failures_s == 10_100
    # Each failure costs half an interval, the time until durable and the restart: 350 s of 2000.
    assert found.with_failures_s == pytest.approx(10_100 / (1 - 350 / 2000))
    assert found.num_failures is not None
    assert found.lost_s == pytest.approx(found.num_failures * 290)
    assert found.restart_s == pytest.approx(found.num_failures * 60)


@pytest.mark.parametrize("mtbf_s", [500, 2000, 1e6])
def test_the_parts_add_up(mtbf_s: float) -> None:
    found = training_time(1000, 10, 500, 5, mtbf_s, 60, 40)
    assert found.with_failures_s is not None
    assert found.lost_s is not None
    assert found.restart_s is not None
    parts = found.productive_s + found.saving_s + found.lost_s + found.restart_s
    assert found.with_failures_s == pytest.approx(parts)


def test_no_progress_and_no_failures() -> None:
    assert training_time(1000, 10, 500, 5, 300, 60, 40).with_failures_s is None
    never = training_time(1000, 10, float("inf"), 5, None, 0, 0)
    assert (never.num_saves, never.saving_s, never.with_failures_s) == (0, 0, None)
