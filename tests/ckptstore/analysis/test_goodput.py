from __future__ import annotations

import pytest
from msgspec.structs import replace

from ckptstore.analysis.goodput import (
    BADPUT,
    SILENT_S,
    Account,
    Beat,
    EndOf,
    Spent,
    TrainerRun,
    _in_one_order,
    account,
    lives_of,
)
from ckptstore.format.records import TrainerEnd
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.histories import History

_T = 1_700_000_000.0


def _life(
    began: float,
    trains: float,
    ended: float,
    parent: int | None = None,
    how: TrainerEnd = TrainerEnd.DIED,
    generation: int = 1,
) -> TrainerRun:
    """One step a second, from the step of the parent on; a beat every ten."""
    first = parent or 0
    beats = [Beat(_T + at, first + int(at - trains)) for at in range(int(trains), int(ended) + 1, 10)]
    return TrainerRun(
        id=new_ulid(_T + began), began_at=_T + began, trains_at=_T + trains, restored_s=5.0 if parent else 0.0,
        parent=Attempt(parent, new_ulid(_T), generation=generation - 1) if parent is not None else None,
        generation=generation, beats=beats, ended=how, ended_at=_T + ended,
    )  # fmt: skip


def _of(*lives: TrainerRun, now: float = 10_000.0) -> Account:
    return account("gpt", lives, _T + now)


def test_steps_after_the_checkpoint_that_was_resumed_from_are_lost() -> None:
    found = _of(_life(0, 10, 110), _life(130, 140, 200, parent=80, how=TrainerEnd.CLOSED, generation=2))
    assert found.seconds == {
        "productive": 80.0 + 60.0, "stall": 0.0, "slowdown": 0.0, "restore": 5.0, "restart": 15.0, "lost": 20.0,
        "waiting": 20.0,
    }  # fmt: skip
    assert (found.step, found.lost_steps) == (140, 20)
    first, second = found.attempts
    assert (first.ended, first.lost_steps, first.resumed_from) == (EndOf.DIED, 20, None)
    assert (second.ended, second.lost_steps, second.resumed_from) == (EndOf.FINISHED, 0, 80)
    assert found.goodput == pytest.approx(140 / 200)
    assert sum(found.badput.values()) == pytest.approx(200 - 140)


def test_a_life_that_nobody_resumed_from_is_lost_as_a_whole() -> None:
    """The second resumed from step 80 and saved nothing that the third used."""
    lives = (
        _life(0, 10, 110),
        _life(130, 140, 200, parent=80, generation=2),
        replace(_life(250, 260, 300, parent=80, how=TrainerEnd.NOT, generation=3), parent=_at(80, 1)),
    )
    found = _of(*lives, now=310)
    assert ([one.lost_steps for one in found.attempts], found.seconds[Spent.LOST]) == ([20, 60, 0], 20 + 60)
    assert found.attempts[-1].ended is EndOf.RUNNING
    assert _of(*lives, now=300 + SILENT_S + 1).attempts[-1].ended is EndOf.VANISHED


def test_a_rewind_in_place_leaves_no_gap() -> None:
    found = _of(
        _life(0, 10, 110, how=TrainerEnd.REWOUND), _life(110, 115, 200, parent=50, how=TrainerEnd.CLOSED, generation=2)
    )
    assert found.seconds[Spent.WAITING] == 0
    assert (found.seconds[Spent.RESTORE], found.seconds[Spent.RESTART]) == (5.0, 10.0)
    assert found.attempts[0].ended is EndOf.REWOUND
    assert found.seconds[Spent.LOST] == 50.0


@pytest.mark.parametrize(("how", "stall"), [(TrainerEnd.CLOSED, 2.0), (TrainerEnd.REWOUND, 0.0)])
def test_what_is_resumed_from_its_last_step_lost_nothing(how: TrainerEnd, stall: float) -> None:
    first = replace(_life(0, 10, 110, how=how), ended_at=_T + 112)
    found = _of(first, _life(130, 140, 200, parent=100, how=TrainerEnd.CLOSED, generation=2))
    assert (found.seconds[Spent.LOST], found.seconds[Spent.STALL]) == (0.0, stall)


def test_an_old_job_that_runs_on_takes_no_time() -> None:
    found = _of(_life(0, 10, 500), _life(130, 140, 200, parent=80, how=TrainerEnd.CLOSED, generation=2))
    assert sum(found.seconds.values()) == pytest.approx(200)
    assert found.seconds[Spent.LOST] == pytest.approx(130 - 90)


def test_a_checkpoint_newer_than_the_last_heartbeat_counts() -> None:
    life = _life(0, 10, 50, how=TrainerEnd.NOT)
    resumed = _life(300, 310, 400, parent=80, how=TrainerEnd.CLOSED, generation=2)
    found = _of(life.with_captures([(_T + 90, 80)]), resumed)
    assert found.attempts[0].ended_at == _T + 90
    assert found.attempts[0].ended is EndOf.VANISHED
    assert found.seconds[Spent.LOST] == 0


def test_costs_of_saves_are_not_productive() -> None:
    beats = [Beat(_T + 60, 40, 5.0, 2.0), Beat(_T + 110, 80, 10.0, 4.0), Beat(_T + 120, 80, 10.0, 4.0)]
    found = _of(replace(_life(0, 10, 130, how=TrainerEnd.CLOSED), beats=beats))
    assert found.seconds[Spent.STALL] == pytest.approx(10 + 10), "and the wait at the end"
    assert found.seconds[Spent.SLOWDOWN] == pytest.approx(4)
    assert found.seconds[Spent.PRODUCTIVE] == pytest.approx(130 - 10 - 24)
    assert found.badput["UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"] == pytest.approx(24)
    assert set(found.badput) == set(BADPUT.values())


@pytest.mark.parametrize("slow_store", [False, True], ids=["usual", "slow store"])
@pytest.mark.parametrize("seed", range(12))
def test_simulated_histories_within_two_per_cent(seed: int, slow_store: bool) -> None:
    history = History(seed, slow_store=slow_store)
    run = Run(open_store("memory://goodput"), "gpt")
    found = account("gpt", lives_of(history.heartbeats(run), (), ()), history.now)
    truth = history.truth()
    total = sum(truth.values())
    assert sum(found.seconds.values()) == pytest.approx(total, rel=0.02)
    wrong = {kind: found.seconds[kind] - truth[kind] for kind in truth}
    assert {kind: by for kind, by in wrong.items() if abs(by) > 0.02 * total} == {}
    assert [one.resumed_from for one in found.attempts] == [
        life.parent.attempt.step if life.parent else None for life in history.lives
    ]


@pytest.mark.parametrize("behind_s", [0.0, 900.0])
def test_a_run_that_goes_on_where_the_clock_is_behind_has_the_same_account(behind_s: float) -> None:
    """By that clock the trainer ended before the checkpoint that it restored was saved."""
    saved = Attempt(80, new_ulid(_T), generation=1)
    lives = _life(0, 10, 110), replace(_life(130, 140, 200, parent=80, generation=2), parent=saved)
    behind = [lives[0], lives[1].later(-behind_s)]
    found = _of(*_in_one_order(behind, {saved: _T + 90}))
    assert [one.generation for one in found.attempts] == [1, 2]
    assert (found.step, found.lost_steps) == (140, 20 if not behind_s else 0)
    assert found.seconds["productive"] == 80.0 + 60.0


def _at(step: int, generation: int) -> Attempt:
    return Attempt(step, new_ulid(_T), generation=generation)
