"""Saves that come while all slots are in use: wait, skip, supersede; and the effect on other ranks of it, or of a rank
that fails."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.saver import pipeline
from ckpt.snapshot.handle import LiveHandle, SaveHandle
from ckptstore import names
from ckptstore.errors import CkptError, SaveSkipped
from ckptstore.names import Attempt, RunKeys, derive_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import collect
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.snapshot.gates import Gate, gated
from tests.ckpt.snapshot.overlapping import held_copies
from tests.ckpt.snapshot.test_agreement import RUN
from tests.support.parallel.runner import Outcome, Scenario, run_named
from tests.support.stores import MovableClock
from tests.support.trainers import suspended
from tests.support.waiting import present, wait_until


def steps(store: Path) -> list[int]:
    return [checkpoint.step for checkpoint in StoreSource(open_store(str(store))).checkpoints("r")]


def test_a_save_is_skipped_without_an_error_while_all_slots_are_in_use(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with Checkpointer(str(tmp_path), run="r", slots=1, on_busy="skip") as checkpointer:
        checkpointer.save(model, None, 1)
        assert checkpointer.saver_pid is not None
        with suspended(checkpointer.saver_pid):
            taken = checkpointer.save_async(model, None, 2)
            skipped = [checkpointer.save_async(model, None, step) for step in (3, 4)]
        assert [handle.done() and handle.skipped for handle in skipped] == [True, True]
        assert "skipped" in repr(skipped[0])
        with pytest.raises(SaveSkipped):
            skipped[0].result()
        assert taken.result(60).step == 2
        assert not taken.skipped
        assert checkpointer.save_async(model, None, 5).result(60).step == 5
        checkpointer.wait()
        counters = checkpointer.counters
        assert (counters.committed, counters.skipped, counters.failed, counters.last_durable_step) == (3, 2, 0, 5)
    assert steps(tmp_path) == [5, 2, 1]


def test_an_error_that_is_being_reported_during_a_save_is_raised_by_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported, go_on, fail, model = threading.Event(), threading.Event(), LiveHandle.fail, nn.Linear(2, 2)

    def fail_late(handle: LiveHandle, error: CkptError) -> None:
        reported.set()
        assert go_on.wait(30)
        fail(handle, error)

    monkeypatch.setattr(LiveHandle, "fail", fail_late)
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with Checkpointer(str(blocked), run="r", retry_s=0.0) as checkpointer:
        first = checkpointer.save_async(model, None, 0)
        assert reported.wait(30)
        second = checkpointer.save_async(model, None, 1)
        go_on.set()
        wait_until(lambda: first.done() and second.done())
        with pytest.raises(CkptError, match="file") as raised:
            checkpointer.save_async(model, None, 2)
        assert raised.value is first.exception()


def test_the_oldest_save_that_waits_gives_its_slot_to_the_newest(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(8, 8)
    with Checkpointer(str(tmp_path), run="r", writer="thread", on_busy="supersede") as checkpointer:
        gate.close()
        first = checkpointer.save_async(model, None, 1)
        wait_until(lambda: gate.waiting == 1)
        second, third, fourth = (checkpointer.save_async(model, None, step) for step in (2, 3, 4))
        with pytest.raises(SaveSkipped, match="superseded by step 3"):
            second.result(60)
        with pytest.raises(SaveSkipped, match="superseded by step 4"):
            third.result(60)
        gate.open()
        checkpointer.wait()
        assert (first.result(0).step, fourth.result(0).step, checkpointer.counters.skipped) == (1, 4, 2)
    assert steps(tmp_path) == [4, 1]


@pytest.mark.parametrize(("on_busy", "save"), [("supersede", "save_async"), ("skip", "save")])
def test_a_slot_that_is_being_uploaded_is_waited_for(on_busy: Any, save: str, tmp_path: Path, gate: Gate) -> None:
    """It cannot be superseded; and `save` waits whatever on_busy is."""
    model = nn.Linear(8, 8)
    with Checkpointer(str(tmp_path), run="r", writer="thread", slots=1, on_busy=on_busy) as checkpointer:
        gate.close()
        first = checkpointer.save_async(model, None, 1)
        wait_until(lambda: gate.waiting == 1)
        opening = threading.Timer(0.3, gate.open)
        opening.start()
        second = getattr(checkpointer, save)(model, None, 2)
        assert gate.is_open
        assert (first.result(60).step, second.step) == (1, 2)
        checkpointer.wait()
        opening.join()
    assert steps(tmp_path) == [2, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("busy")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    scenarios = {
        on_busy: Scenario(f"{__name__}:rank_one_is_busy", 2, {"store": str(folder / on_busy), "on_busy": on_busy})
        for on_busy in ("skip", "supersede")
    }
    for name, scenario in (("fail", "rank_one_fails"), ("idle", "rank_one_loses_its_idle_saver")):
        scenarios[name] = Scenario(f"{__name__}:{scenario}", 2, {"store": str(folder / name)})
    return run_named(scenarios, folder / "ranks")


def test_the_other_ranks_skip_a_save_at_once_that_one_rank_skipped(folder: Path, outcomes: dict[str, Outcome]) -> None:
    for on_busy, skipped in (("skip", [4, 5]), ("supersede", [3, 4])):
        kept = sorted({1, 2, 3, 4, 5} - set(skipped))
        first, second = outcomes[on_busy].result()
        for rank in (first, second):
            assert (rank["committed"], list(rank["skipped"])) == (kept, [str(step) for step in skipped])
        assert all("skipped by rank 1" in said for said in first["skipped"].values())
        source = StoreSource(open_store(str(folder / on_busy)))
        assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == kept[::-1]


def test_the_other_ranks_fail_at_once_with_the_cause(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """Its saver was killed, its shard cannot be written, its snapshot is torn; what it leaves is collected."""
    first, second = outcomes["fail"].result()
    for step, cause in {"2": "saver_died", "3": "store_unavailable", "4": "snapshot_torn"}.items():
        code, message = first["errors"][step]
        assert code == "rank_failed"
        assert f"rank 1 could not save step {step} " in message
        assert second["errors"][step][0] == cause
        assert f": {cause}: " in message
    assert (first["committed"], second["committed"]) == (5, 5)
    store, clock = open_store(str(folder / "fail")), MovableClock()
    run = Run(store, RUN, clock)
    assert [checkpoint.step for checkpoint in StoreSource(store).checkpoints(RUN)] == [5, 1]
    clock.advance(2 * 24 * 3600)
    collect(run)
    assert {Attempt.parse(info.key.split("/")[2]).step for info in store.list(run.keys.attempts)} == {1, 5}


def test_a_rank_whose_save_raises_fails_that_step_alone_for_all(folder: Path, outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["idle"].result()
    assert (second["raised"], second["failed"], second["committed"]) == ({"2": "saver_died"}, {}, [3, 4])
    assert (first["raised"], first["committed"]) == ({}, [3, 4])
    code, message = first["failed"]["2"]
    assert code == "rank_failed"
    assert message.startswith("rank 1 could not save step 2 of run 'saving': saver_died: ")
    source = StoreSource(open_store(str(folder / "idle")))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [4, 3, 1]


_COMMIT_TIMEOUT_S = 300.0
_AT_ONCE_S = 60.0
"""A handle that has no result by then waits for the commit's time-out."""


def rank_one_is_busy(store: str, on_busy: Literal["skip", "supersede"]) -> dict[str, Any]:
    """Step 2 hangs in rank 1's upload, step 3 waits behind it, and 4 and 5 find no slot."""
    rank, gate = dist.get_rank(), Gate()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with (
        patch.object(pipeline, "open_store", gated(gate)),
        Checkpointer(
            store, run=RUN, writer="thread", slots=2 if rank else 8, on_busy=on_busy, peer_timeout_s=_COMMIT_TIMEOUT_S
        ) as checkpointer,
    ):
        checkpointer.save(model, None, 1)
        if rank == 1:
            gate.close()
        handles = {}
        for step in (2, 3, 4, 5):
            nn.init.constant_(model.get_parameter(f"stage{rank}.weight"), step)
            handles[step] = checkpointer.save_async(model, None, step)
            if rank == 1:
                wait_until(lambda: gate.waiting == 1)
        gate.open()
        committed, skipped = [1], {}
        for step, handle in handles.items():
            try:
                committed.append(handle.result(_AT_ONCE_S).step)
            except SaveSkipped as error:
                skipped[str(step)] = str(error)
    return {"committed": committed, "skipped": skipped}


def rank_one_fails(store: str) -> dict[str, Any]:
    """Rank 1 loses its saver in step 2, cannot write its shard in step 3, and its snapshot of step 4 is torn."""
    rank, errors = dist.get_rank(), {}
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(128, 128)})  # of a size that is copied beside training
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(store, run=RUN, peer_timeout_s=_COMMIT_TIMEOUT_S) as checkpointer:
        checkpointer.save(model, optim, 1)
        for step, fail in ((2, _kill_saver), (3, _block_shard), (4, _tear)):
            nn.init.constant_(model.get_parameter(f"stage{rank}.weight"), step)
            errors[step] = _error(fail(checkpointer, model, optim, step, Path(store)))
            try:
                checkpointer.wait()
            except CkptError:
                pass  # the death of the saver, which the save died of
            dist.barrier()
        committed = checkpointer.save(model, optim, 5).step
    return {"errors": errors, "committed": committed}


def rank_one_loses_its_idle_saver(store: str) -> dict[str, Any]:
    """Rank 1's saver is killed between two saves. The loop logs what save_async raises, and goes on."""
    rank, raised, failed, committed = dist.get_rank(), {}, {}, []
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with Checkpointer(store, run=RUN, peer_timeout_s=_COMMIT_TIMEOUT_S) as checkpointer:
        checkpointer.save(model, None, 1)
        if rank == 1 and checkpointer.saver_pid is not None:
            os.kill(checkpointer.saver_pid, signal.SIGKILL)
            wait_until(lambda: checkpointer.saver_pid is None)
        handles: list[SaveHandle] = []
        for step in (2, 3, 4):
            try:
                handles.append(checkpointer.save_async(model, None, step))
            except CkptError as error:
                raised[step] = error.code
            wait_until(lambda: all(handle.done() for handle in handles))  # without reading their errors
            dist.barrier()
        for handle in handles:
            if handle.exception() is None:
                committed.append(handle.step)
            else:
                failed[handle.step] = _error(handle)
    return {"raised": raised, "failed": failed, "committed": committed}


def _kill_saver(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    pid = present(checkpointer.saver_pid)
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGSTOP)
    handle = checkpointer.save_async(model, optim, step)
    optim.step()
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGKILL)
    return handle


def _block_shard(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    session = present(checkpointer._saves.agreement.session)
    attempt = Attempt(step, derive_ulid(session, step, 0), generation=1)
    if dist.get_rank() == 1:
        (store / RunKeys(RUN).shard(attempt, names.shard_name(1))).mkdir(parents=True)
    return checkpointer.save_async(model, optim, step)


def _tear(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    with held_copies() as brake:
        handle = checkpointer.save_async(model, optim, step)
        if dist.get_rank() == 1:
            nn.init.constant_(model.get_parameter("stage1.weight"), 7.0)
        brake.released.set()
        optim.step() if dist.get_rank() == 0 else checkpointer._saves._join()
    return handle


def _error(handle: SaveHandle) -> tuple[str, str]:
    try:
        handle.result(_AT_ONCE_S)
    except CkptError as error:
        return error.code, error.message
    raise AssertionError(f"{handle} did not fail")
