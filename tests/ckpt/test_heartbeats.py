from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.analysis.goodput import EndOf, read_account
from ckptstore.commits.audit import operator
from ckptstore.commits.heartbeats import read_heartbeats
from ckptstore.format.records import TrainerEnd
from ckptstore.run import Run, origin
from ckptstore.stores import open_store
from tests.support.trainers import is_alive, trainer_on
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.config.HEARTBEAT_S", 0.05)


def _run(folder: Path, name: str) -> Run:
    return Run(open_store(str(folder)), name)


def test_a_killed_trainer_and_the_one_that_resumes(tmp_path: Path) -> None:
    run = _run(tmp_path, "kill")
    for number in (1, 2):
        with trainer_on(tmp_path) as trainer:
            goal = number * 5
            wait_until(lambda: trainer.saved >= goal)  # noqa: B023 - called at once
            trainer.kill()
        wait_until(lambda: not is_alive(trainer.saver))
        found = read_heartbeats(run)
        assert ([one.ended for one in found], found[-1].generation) == ([TrainerEnd.DIED] * number, number)
        assert found[-1].step[-1] >= trainer.saved
    first, second = read_account(run).attempts
    assert (first.ended, second.ended) == (EndOf.DIED, EndOf.DIED)
    assert (first.resumed_from, second.resumed_from) == (None, second.first_step)
    assert first.last_step >= second.first_step
    assert first.seconds["restart"] > 0, "from the start of the process"
    assert second.seconds["restore"] > 0


def test_a_rewind_in_place_is_another_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    model = nn.Linear(64, 64)
    optim, run = torch.optim.AdamW(model.parameters()), _run(tmp_path, "r")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        for step in (10, 20):
            checkpointer.save(model, optim, step)
        wait_until(lambda: [one.step[-1:] for one in read_heartbeats(run)] == [[20]], "the first heartbeat")
        checkpointer.restore(model, optim, checkpoint=10)
        schedule = checkpointer.every(60)
        schedule.due(11)
        checkpointer.save(model, optim, 12)
        wait_until(lambda: len(read_heartbeats(run)) == 2, "the second")
        schedule.request()
        checkpointer.save(model, optim, 13)
    found = read_account(run)
    assert [one.ended for one in found.attempts] == [EndOf.REWOUND, EndOf.PREEMPTED]
    assert [one.generation for one in found.attempts] == [1, 2]
    assert [one.resumed_from for one in found.attempts] == [None, 10]
    assert [one.lost_steps for one in found.attempts] == [10, 0]
    assert found.seconds["stall"] > 0, "saves that are waited for"
    assert (found.step, [one.origin for one in found.attempts]) == (13, [origin()] * 2)
    assert str(origin()) == f"{operator()} · slurm 4711"
    store = run.store
    store.delete_many([info.key for info in store.list(run.keys.heartbeats)])
    assert all(one.origin == origin() for one in read_account(run).attempts), "known by the generations"


def test_a_cell_that_is_run_again_loses_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    for step in (10, 20):
        with Checkpointer(str(tmp_path), run="again", writer="thread") as checkpointer:
            checkpointer.save(model, optim, step)
    found = read_account(_run(tmp_path, "again"))
    assert [(one.ended, one.resumed_from) for one in found.attempts] == [(EndOf.STOPPED, None), (EndOf.FINISHED, 10)]
    assert found.seconds["lost"] == 0


def test_the_trials_of_a_process_follow_each_other(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with Checkpointer(str(tmp_path), run=name, writer="thread") as checkpointer:
            checkpointer.save(nn.Linear(4, 4), None, 1)
    one, two = (read_account(_run(tmp_path, name)).attempts[0] for name in ("one", "two"))
    assert two.began_at > one.trains_at


def test_steps_are_counted_where_nothing_names_them(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)
    optim, run = torch.optim.AdamW(model.parameters()), _run(tmp_path, "r")
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.prepare(model, optim)

        def train(steps: int) -> None:
            for _ in range(steps):
                model(torch.ones(1, 64)).sum().backward()
                optim.step()

        train(4)
        checkpointer.save(model, optim, 8)  # two of the caller's steps per optim.step()
        train(3)
        wait_until(lambda: [one.step[-1:] for one in read_heartbeats(run)] == [[14]], "a heartbeat between saves")


@pytest.mark.parametrize("saved_since", [False, True])
def test_an_exception_that_a_notebook_showed_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_since: bool
) -> None:
    run = _run(tmp_path, "r")
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(nn.Linear(4, 4), None, 1)
        monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)
        if saved_since:
            checkpointer.save(nn.Linear(4, 4), None, 2)
    assert [one.ended for one in read_account(run).attempts] == [EndOf.FINISHED if saved_since else EndOf.ERROR]


def test_an_exception_ends_an_attempt_with_an_error(tmp_path: Path) -> None:
    run = _run(tmp_path, "r")
    with suppress(ZeroDivisionError), Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.save(nn.Linear(4, 4), None, 1)
        wait_until(lambda: read_heartbeats(run) != [], "a heartbeat")
        raise ZeroDivisionError
    assert [one.ended for one in read_account(run).attempts] == [EndOf.ERROR]
