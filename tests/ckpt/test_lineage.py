"""Trainers that follow, replace and rewind each other: which checkpoints a restart resumes from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer, SaveHandle
from ckpt.snapshot import run_saves
from ckptstore.commits.catalog import State, list_checkpoints
from ckptstore.commits.generations import read_generations
from ckptstore.errors import CorruptObject, InvalidRequest, Superseded
from ckptstore.retention.deletion import collect, delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store, open_store

RUN = "gpt"


class Job:
    """A training job: its process is never told to end."""

    def __init__(self, store: str, **config: object) -> None:
        self.net = nn.Linear(4, 4)
        self.optim = torch.optim.SGD(self.net.parameters(), momentum=0.9)
        self.checkpointer = Checkpointer(store, **{"run": RUN, "writer": "thread", **config})  # type: ignore[arg-type]

    def save(self, *steps: int) -> None:
        """Save these steps, each durable before the next."""
        for step in steps:
            self.save_async(step).result(60.0)

    def save_async(self, step: int) -> SaveHandle:
        """The weight is the number of the step."""
        nn.init.constant_(self.net.weight, step)
        return self.checkpointer.save_async(self.net, self.optim, step)

    def restore(self, checkpoint: int | str | None = None) -> int | None:
        """The restored step; None if there is none."""
        found = self.checkpointer.restore(self.net, self.optim, checkpoint=checkpoint)
        if found is None:
            return None
        assert float(self.net.weight[0, 0].detach()) == found.step
        return found.step


in_both_ways = pytest.mark.parametrize("jobs", ["process", "thread"], indirect=True)


@pytest.fixture
def jobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def new_job(**config: object) -> Job:
        made.append(Job(str(tmp_path / "store"), **{"writer": getattr(request, "param", "thread"), **config}))
        return made[-1]

    yield new_job
    for job in made:
        try:
            job.checkpointer.close()
        except Superseded:
            pass  # of a handle that the test did not look at


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(open_store(str(tmp_path / "store")), RUN)


def elsewhere(sessions: dict[Any, Any] | None = None) -> dict[Any, Any]:
    """What follows is in another process, or in the one of these sessions. Returns the sessions of this one."""
    before, run_saves._sessions = run_saves._sessions, sessions or {}
    return before


def states(run: Run) -> dict[int, str]:
    return {c.step: c.state for c in list_checkpoints(run)}


@in_both_ways
def test_a_job_that_comes_back_after_its_successor_cannot_save_any_more(jobs: Callable[..., Job], run: Run) -> None:
    old = jobs()
    old.save(100, 200, 300)
    successor = jobs()
    assert successor.restore() == 300
    successor.save(310)
    with pytest.raises(Superseded, match="generation 2"):
        old.save(400)
    for _ in range(2):
        with pytest.raises(Superseded) as caught:
            old.save_async(500)
        assert "restore" in caught.value.hint
    successor.save(320)
    assert states(run) == dict.fromkeys((100, 200, 300, 310, 320), State.COMMITTED)
    assert jobs().restore() == 320
    # A restore joins it: it is the newest trainer now, and supersedes in turn.
    assert old.restore() == 320
    old.save(330)
    with pytest.raises(Superseded):
        successor.save(330)


def test_the_next_call_raises_it_if_nobody_looked_at_the_handle(jobs: Callable[..., Job], run: Run) -> None:
    old, successor = jobs(), jobs()
    old.save(100)
    assert successor.restore() == 100
    successor.save(110)
    assert old.save_async(200)._finished.wait(60.0)
    with pytest.raises(Superseded):
        old.checkpointer.wait()


def test_what_an_old_job_had_already_committed_is_abandoned(jobs: Callable[..., Job], run: Run) -> None:
    """It looked for a newer generation when there was none: its commit is valid, and never latest."""
    old, successor = jobs(), jobs()
    old.save(100, 200, 300)
    assert successor.restore() == 300
    old.save(400, 500)
    assert jobs().restore() == 500, "the successor has not saved yet"
    successor.save(310, 320)
    assert states(run) == {
        320: State.COMMITTED, 310: State.COMMITTED, 500: State.ABANDONED, 400: State.ABANDONED,
        300: State.COMMITTED, 200: State.COMMITTED, 100: State.COMMITTED,
    }  # fmt: skip
    assert jobs().restore() == 320
    assert jobs().restore(500) == 500, "named, it is restored"
    collect(run)
    assert jobs().restore() == 320


@in_both_ways
def test_rewinding_in_place(jobs: Callable[..., Job], run: Run) -> None:
    """Training diverged: the operator goes back, and every restart resumes the new branch from its first save on."""
    job = jobs()
    job.save(100, 200, 300, 900)
    assert job.restore(300) == 300
    job.save(310)
    again = jobs()
    assert again.restore() == 310
    again.save(320)
    assert (states(run)[900], jobs().restore()) == (State.ABANDONED, 320)
    # Damage in the new branch falls back along the lineage, never to an abandoned checkpoint.
    for step in (320, 310):
        (found,) = (c for c in list_checkpoints(run) if c.step == step)
        run.store.put(run.keys.shard(found.attempt, "shard-00000.ckpt"), b"damaged")
    assert jobs().restore() == 300
    parents = [document and document.parent for document in read_generations(run).values()]
    assert [parent and int(parent.split("-")[1]) for parent in parents] == [None, 300, 310]


def test_an_evaluation_changes_nothing(jobs: Callable[..., Job], run: Run) -> None:
    job = jobs()
    job.save(100, 200)
    jobs().restore(100)
    # In the trainer itself: a teacher, without an optimizer.
    job.checkpointer.restore(nn.Linear(4, 4), checkpoint=100)
    job.save(300)
    assert (len(read_generations(run)), jobs().restore()) == (1, 300)


def test_the_first_restore_counts_without_an_optimizer_too(jobs: Callable[..., Job], run: Run) -> None:
    jobs().save(100, 200)
    job = jobs()
    job.checkpointer.restore(job.net, checkpoint=100)
    job.save(110)
    assert states(run) == {110: State.COMMITTED, 200: State.ABANDONED, 100: State.COMMITTED}


def test_no_restore_is_warned_of_once(jobs: Callable[..., Job], run: Run, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckpt"):
        jobs().save(100, 200)
        assert "abandoned" not in caplog.text
        elsewhere()
        jobs().save(10, 20)
    assert caplog.text.count("are abandoned") == 1
    assert f"the newest is {RUN}@200." in caplog.text
    assert "it continues from nothing" in caplog.text
    assert (jobs().restore(), states(run)[200]) == (20, State.ABANDONED)


def test_an_error_about_damage_names_abandoned_checkpoints(jobs: Callable[..., Job], run: Run) -> None:
    jobs().save(10)
    elsewhere()
    jobs().save(20)
    (found,) = (c for c in list_checkpoints(run) if c.step == 20)
    run.store.put(run.keys.shard(found.attempt, "shard-00000.ckpt"), b"damaged")
    with pytest.raises(CorruptObject, match="none of the 1 checkpoints") as caught:
        jobs().restore()
    assert f"restore(checkpoint='{RUN}@10." in caught.value.hint


@pytest.mark.parametrize(
    ("steps", "closed"), [((30,), False), ((200,), True), ((300, 400), False)], ids=["lower", "the same", "higher"]
)
def test_a_second_checkpointer_of_the_process_continues_the_run(
    jobs: Callable[..., Job], run: Run, caplog: pytest.LogCaptureFixture, steps: tuple[int, ...], closed: bool
) -> None:
    """The cell of a notebook is run again."""
    first = jobs()
    first.save(100)
    first.save_async(200)
    if closed:
        first.checkpointer.close()
    jobs().save(*steps)
    assert {c.state for c in list_checkpoints(run)} == {State.COMMITTED}
    assert {c.step for c in list_checkpoints(run)} == {100, 200, *steps}
    third = jobs()
    third.checkpointer.restore(third.net, checkpoint="gpt@100")
    jobs().save(110)  # also what was only restored
    assert jobs().restore() == 110
    assert "are abandoned" in caplog.text, "those after step 100"
    assert f"the newest is {RUN}@{steps[-1]}." in caplog.text


def test_a_second_checkpointer_names_what_another_process_saved_meanwhile(
    jobs: Callable[..., Job], run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    jobs().save(100)
    here, other = elsewhere(), jobs()
    other.restore()
    other.save(200)
    assert not caplog.text
    elsewhere(here)
    jobs().save(110)
    assert f"the newest is {RUN}@200." in caplog.text
    assert "it continues from step 100" in caplog.text


def test_a_run_begins_from_a_checkpoint_of_another(jobs: Callable[..., Job]) -> None:
    jobs().save(5)
    tuned = jobs(run="tuned")
    assert tuned.restore() is None
    assert tuned.restore(f"{RUN}@5") == 5
    tuned.save(1)
    assert jobs(run="tuned").restore() == 1


def test_a_step_is_saved_once(jobs: Callable[..., Job], run: Run) -> None:
    job = jobs()
    job.save(100)
    with pytest.raises(InvalidRequest, match="saved already"):
        job.save_async(100)
    job.save(110)
    for repeats in (False, True):
        with pytest.raises(InvalidRequest, match=r"step 110 .* not continue from this save of step 105") as caught:
            job.checkpointer.save_async(job.net, job.optim, 105, repeat_step=repeats)
        assert "Count steps over all epochs" in caught.value.hint
    assert job.restore(100) == 100
    job.save(110)
    assert [c.step for c in list_checkpoints(run) if c.state is State.COMMITTED] == [110, 100]
    allowed = jobs()
    assert allowed.restore() == 110
    allowed.save(120)
    allowed.checkpointer.save(allowed.net, allowed.optim, 120, repeat_step=True)
    assert [c.state for c in list_checkpoints(run)][:2] == [State.COMMITTED, State.SUPERSEDED]


def test_a_failed_step_may_be_saved_again(jobs: Callable[..., Job], run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = jobs()
    job.save(100)

    def refuse(self: Store, *args: object, **kwargs: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("ckpt.saver.pipeline.upload_shard", refuse)
        with pytest.raises(Exception, match="no space"):
            job.save(110)
    job.save(110)
    assert jobs().restore() == 110


def test_a_deleted_branch_gives_way_to_the_one_before(jobs: Callable[..., Job], run: Run) -> None:
    job = jobs()
    job.save(100, 200)
    job.restore(100)
    job.save(110)
    (branch,) = (c for c in list_checkpoints(run) if c.step == 110)
    assert job.restore(200) == 200, "so that 110 is not leased"
    delete_checkpoint(run, branch.attempt, "a mistake", force=True)
    assert jobs().restore() == 200
