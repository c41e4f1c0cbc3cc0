from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.preemption import Preemption, SaveEstimate
from ckpt.schedule import Limits, Schedule
from ckpt.snapshot.costs import StepClock
from ckpt.snapshot.handle import LiveHandle, SaveHandle
from ckptplan.training import best_interval
from ckptstore.errors import InvalidRequest, SaveFailed


def schedule_of(
    newest: Callable[[], SaveHandle | None], limits: Limits, peer_timeout_s: float, **options: Any
) -> Schedule:
    """A Schedule of no Checkpointer; without notice of a preemption, unless that is given."""
    unwarned = Preemption(lambda seconds, _: SaveEstimate("save", seconds, None), lambda: None)
    fields = {"steps": StepClock(), "preemption": unwarned, **options}
    return Schedule(newest, limits, peer_timeout_s, **{f"_{name}": one for name, one in fields.items()})


@dataclass
class Training:
    """A loop whose steps and saves take as long as the test says. Times are seconds."""

    seconds: float | None = None
    overhead: float | None = None
    mtbf_s: float | None = None
    step_s: float = 0.1
    blocked_s: float = 0.0
    held_s: float = 0.0
    durable_s: float = 0.0
    slowdown: float = 1.0
    """Of steps that begin while a save is under way."""
    noise: Callable[[int], float] = lambda step: 0.0
    now: float = 1000.0
    step: int = 0
    stride: int = 1
    saves: list[tuple[int, float]] = field(default_factory=list)
    """Steps and times."""
    lost_s: float = 0.0
    """What all saves cost."""

    def __post_init__(self) -> None:
        self._newest: LiveHandle | None = None
        self.schedule = schedule_of(
            lambda: self._newest, Limits.of(self.seconds, self.overhead, self.mtbf_s), peer_timeout_s=1.0,
            clock=lambda: self.now,
        )  # fmt: skip

    def run(self, seconds: float) -> Training:
        end = self.now + seconds
        while self.now < end:
            self.step += self.stride
            if self._newest is not None and self.now >= self.saves[-1][1] + self.durable_s:
                self._newest.fail(SaveFailed("it does not matter how it ends"))
            under_way = self._newest is not None and not self._newest.done()
            saves = self.schedule.due(self.step)
            if saves:
                self.saves.append((self.step, self.now))
                self._newest = LiveHandle(self.step, 0, 0.0)
                self._newest.measure(blocked_s=self.blocked_s)
                self._newest.measure(held_s=self.held_s)
            slower = (self.slowdown - 1) * self.step_s if under_way or saves else 0.0
            waited = self.blocked_s + self.held_s if saves else 0.0
            self.lost_s += slower + waited
            self.now += self.step_s + self.noise(self.step) + slower + waited
        return self

    @property
    def intervals(self) -> list[float]:
        return [after - before for before, after in pairwise([at for _, at in self.saves])]


def test_a_fixed_interval() -> None:
    training = Training(seconds=30.0, blocked_s=0.5, durable_s=2.0).run(200)
    assert training.saves[0][1] - 1000.0 == pytest.approx(30.0, abs=0.2)
    assert training.intervals == pytest.approx([30.0] * len(training.intervals), abs=0.7)
    assert len(training.intervals) == 5


def test_the_interval_follows_from_the_cost() -> None:
    training = Training(overhead=0.01, blocked_s=0.3, held_s=0.2, durable_s=3.0).run(200)
    assert training.saves[0][0] <= 10, "the cost is unknown before the first save"
    assert training.intervals == pytest.approx([50.0] * 3, abs=0.7)


def test_slower_steps_while_a_save_is_under_way_are_a_cost() -> None:
    training = Training(overhead=0.01, blocked_s=0.1, durable_s=2.0, slowdown=1.5).run(400)
    # Of 2 s, a third is lost.
    assert training.intervals[1:] == pytest.approx([10 + 100 * 2 / 3] * len(training.intervals[1:]), rel=0.1)
    assert training.lost_s <= 0.0105 * 400 + 0.8


def test_the_longer_interval_rules() -> None:
    assert Training(seconds=20.0, overhead=0.01, blocked_s=0.5).run(200).intervals == pytest.approx([50] * 3, abs=0.7)
    assert Training(seconds=90.0, overhead=0.01, blocked_s=0.5).run(300).intervals == pytest.approx([90] * 2, abs=0.7)


def test_saves_do_not_pile_up() -> None:
    training = Training(seconds=1.0, overhead=0.5, blocked_s=0.01, durable_s=7.0).run(100)
    assert training.intervals == pytest.approx([14.0] * len(training.intervals), abs=0.3)
    assert len(training.intervals) > 4


def test_a_cheap_save_is_made_often_but_half_of_the_time_none_is_under_way() -> None:
    training = Training(overhead=0.01, blocked_s=0.001, durable_s=0.45).run(20)
    assert training.intervals == pytest.approx([1.0] * len(training.intervals), abs=0.2)


@pytest.mark.parametrize(("window", "stride"), [(1, 1), (2, 1), (4, 1), (4, 10), (7, 3)])
def test_no_save_is_due_within_an_accumulation_window(window: int, stride: int) -> None:
    now, calls = 0.0, 0
    schedule = schedule_of(
        lambda: None, Limits(5.0, None), 1.0, clock=lambda: now, optimizer_steps=lambda: calls // window
    )
    due = []
    for calls in range(1, 200):
        now = float(calls)
        if calls == 3:
            schedule.request()
        due += [calls] if schedule.due(stride * calls) else []
    assert all(number % window == 0 for number in due)
    assert due[0] <= 2 * window + 2
    assert len(due) >= 199 // (5 + window)


def due(steps: int, every_s: float, **options: Any) -> list[int]:
    """At which steps, of a second each, a save is due that is never made."""
    now = 0.0
    schedule, found = schedule_of(lambda: None, Limits(every_s, None), 1.0, clock=lambda: now, **options), []
    for step in range(steps):
        now = float(step)
        found += [step] if schedule.due(step) else []
    return found


def test_saves_are_due_where_optimizers_are_not_seen() -> None:
    assert len(due(40, 5.0, optimizer_steps=lambda: 0)) >= 4


def test_a_save_that_was_not_made_is_asked_for_again_after_the_interval() -> None:
    assert due(100, 10.0) == [10, 20, 30, 40, 50, 60, 70, 80, 90]


def test_unscheduled_saves_count() -> None:
    handles: list[SaveHandle | None] = [None]
    now = 0.0
    schedule = schedule_of(lambda: handles[-1], Limits(10.0, None), peer_timeout_s=1.0, clock=lambda: now)
    due = []
    for step in range(40):
        now = float(step)
        due += [step] if schedule.due(step) else []
        if step == 5:
            handle = LiveHandle(step, 0, 0.0)
            handle.fail(SaveFailed(""))
            handles.append(handle)
    assert due == [15, 25, 35]


def test_a_request_is_due_at_once_and_once() -> None:
    training = Training(seconds=1000.0, durable_s=5.0).run(10)
    for _ in range(2):  # the second while a save is under way
        training.schedule.request()
        training.schedule.request()
        step = training.step
        training.run(1.0)
        assert training.saves[-1][0] == step + 1
    assert len(training.saves) == 2


def test_steps_may_be_left_out() -> None:
    training = Training(seconds=30.0, stride=250).run(100)
    assert training.intervals == pytest.approx([30.0] * 2, abs=0.2)
    assert all(step % 250 == 0 for step, _ in training.saves)


def test_steps_increase() -> None:
    schedule = Training(seconds=30.0).schedule
    schedule.due(7)
    for step in (7, 3):
        with pytest.raises(InvalidRequest, match="after step 7"):
            schedule.due(step)


@pytest.mark.parametrize(
    ("seconds", "overhead", "mtbf_s"),
    [
        (None, None, None), (0.0, 0.01, None), (-1.0, None, None), (math.inf, None, None), (None, 0.0, None),
        (None, 1.5, None), (None, None, 0.0), (None, None, math.inf),
    ],
)  # fmt: skip
def test_what_makes_no_schedule(seconds: float | None, overhead: float | None, mtbf_s: float | None) -> None:
    with pytest.raises(InvalidRequest):
        Limits.of(seconds, overhead, mtbf_s)


def test_the_interval_loses_the_least_to_saves_and_failures() -> None:
    cost_s, mtbf_s = 0.5, 3600.0
    training = Training(mtbf_s=mtbf_s, blocked_s=0.3, held_s=0.2, durable_s=3.0).run(400)
    best = best_interval(cost_s, mtbf_s, durable_s=3.0)
    assert best == pytest.approx(59.4, abs=0.1)
    assert training.intervals == pytest.approx([best] * len(training.intervals), abs=0.7)
    assert len(training.intervals) == 6


def test_failures_sooner_than_saves_are_durable_do_not_stop_saving() -> None:
    training = Training(mtbf_s=2.0, blocked_s=0.1, durable_s=3.0).run(60)
    assert training.intervals == pytest.approx([6.0] * len(training.intervals), abs=0.3)
    assert len(training.intervals) > 5


def test_a_failure_rate_replaces_the_share_of_time_unless_both_are_given() -> None:
    assert Limits.of(None, "auto", None) == Limits(None, 0.01)
    assert Limits.of(None, "auto", 3600.0) == Limits(None, None, 3600.0)
    assert Limits.of(10.0, 0.02, 3600.0) == Limits(10.0, 0.02, 3600.0)
    assert Limits.of(10.0, 0.02, 3600.0).interval_s(cost_s=5.0, durable_s=1.0) == 250.0
    assert Limits.of(10.0, None, 3600.0).interval_s(cost_s=5.0, durable_s=1.0) == pytest.approx(
        best_interval(5, 3600, 0, 1)
    )


@settings(max_examples=30)
@given(
    step_s=st.floats(0.01, 2.0), blocked_s=st.floats(0.0, 1.0), held_s=st.floats(0.0, 1.0),
    durable_s=st.floats(0.0, 20.0), slowdown=st.floats(1.0, 2.0), overhead=st.floats(0.005, 0.2),
    spread=st.floats(0.0, 0.5),
)  # fmt: skip
def test_saves_cost_no_more_than_their_share(
    step_s: float, blocked_s: float, held_s: float, durable_s: float, slowdown: float, overhead: float, spread: float
) -> None:
    training = Training(
        overhead=overhead, step_s=step_s, blocked_s=blocked_s, held_s=held_s, durable_s=durable_s, slowdown=slowdown,
        noise=lambda step: spread * step_s * ((step * 7919) % 101) / 101,
    )  # fmt: skip
    training.run(600 * step_s)
    # Each save is paid for before the next one: only the last may not be yet. What steps take longer is believed
    # when five of them were seen, and medians miss a part of the noise.
    slower, noise = (slowdown - 1) * (durable_s + 2 * step_s), spread * (durable_s + step_s)
    allowed = overhead * (training.now - 1000.0) + blocked_s + held_s + 5 * slower + noise * len(training.saves)
    assert training.lost_s <= allowed + 1e-6
