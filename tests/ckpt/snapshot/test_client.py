"""Saves that come while all slots are in use: wait, skip, supersede; and the effect on other ranks of it, or of a rank
that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from ckpt import Checkpointer
from ckpt.snapshot import writers
from ckptstore.errors import SaveSkipped
from ckptstore.names import Attempt
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import collect
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.snapshot.gates import Gate, gated
from tests.ckpt.snapshot.saving_ranks import RUN
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.stores import MovableClock
from tests.support.trainers import suspended
from tests.support.waiting import wait_until


def steps(store: Path) -> list[int]:
    return [checkpoint.step for checkpoint in StoreSource(open_store(str(store))).checkpoints("r")]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No upload of writer="thread" begins while it is closed."""
    gate = Gate()
    monkeypatch.setattr(writers, "open_store", gated(gate))
    yield gate
    gate.open()


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
        assert (first.result(0).step, fourth.result(0).step) == (1, 4)
        assert checkpointer.counters.skipped == 2
    assert steps(tmp_path) == [4, 1]


def test_what_is_being_uploaded_is_not_superseded(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(8, 8)
    with Checkpointer(str(tmp_path), run="r", writer="thread", slots=1, on_busy="supersede") as checkpointer:
        gate.close()
        first = checkpointer.save_async(model, None, 1)
        wait_until(lambda: gate.waiting == 1)
        opening = threading.Timer(1.0, gate.open)
        opening.start()
        second = checkpointer.save_async(model, None, 2)
        assert gate.is_open
        assert second.timings.wait_s > 0
        assert (first.result(60).step, second.result(60).step) == (1, 2)
        opening.join()


def test_save_waits_for_a_slot_whatever_on_busy_is(tmp_path: Path, gate: Gate) -> None:
    model = nn.Linear(8, 8)
    with Checkpointer(str(tmp_path), run="r", writer="thread", slots=1, on_busy="skip") as checkpointer:
        gate.close()
        first = checkpointer.save_async(model, None, 1)
        opening = threading.Timer(0.2, gate.open)
        opening.start()
        assert checkpointer.save(model, None, 2).step == 2
        assert first.done()
        opening.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("busy")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    scenarios = {
        on_busy: Scenario(
            "tests.ckpt.snapshot.busy_ranks:rank_one_is_busy", 2, {"store": str(folder / on_busy), "on_busy": on_busy}
        )
        for on_busy in ("skip", "supersede")
    }
    for name, scenario in (("fail", "rank_one_fails"), ("idle", "rank_one_loses_its_idle_saver")):
        scenarios[name] = Scenario(f"tests.ckpt.snapshot.busy_ranks:{scenario}", 2, {"store": str(folder / name)})
    (folder / "ranks").mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder / "ranks"), strict=True))


def test_the_other_ranks_skip_a_save_at_once_that_one_rank_skipped(folder: Path, outcomes: dict[str, Outcome]) -> None:
    for on_busy, skipped in (("skip", [4, 5]), ("supersede", [3, 4])):
        kept = sorted({1, 2, 3, 4, 5} - set(skipped))
        first, second = outcomes[on_busy].result()
        for rank in (first, second):
            assert rank["committed"] == kept
            assert list(rank["skipped"]) == [str(step) for step in skipped]
        assert all("skipped by rank 1" in said for said in first["skipped"].values())
        source = StoreSource(open_store(str(folder / on_busy)))
        assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == kept[::-1]


def test_the_other_ranks_fail_at_once_with_the_cause(folder: Path, outcomes: dict[str, Outcome]) -> None:
    """Its saver was killed, its shard cannot be written, its snapshot is torn; what it leaves is collected."""
    first, second = outcomes["fail"].result()
    causes = {"2": "saver_died", "3": "store_unavailable", "4": "snapshot_torn"}
    for step, cause in causes.items():
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
    left = {Attempt.parse(info.key.split("/")[2]).step for info in store.list(run.keys.attempts)}
    assert left == {1, 5}


def test_a_rank_whose_save_raises_fails_that_step_for_all_and_no_later_one(
    folder: Path, outcomes: dict[str, Outcome]
) -> None:
    first, second = outcomes["idle"].result()
    assert (second["raised"], second["failed"], second["committed"]) == ({"2": "saver_died"}, {}, [3, 4])
    assert (first["raised"], first["committed"]) == ({}, [3, 4])
    code, message = first["failed"]["2"]
    assert code == "rank_failed"
    assert message.startswith("rank 1 could not save step 2 of run 'saving': saver_died: ")
    source = StoreSource(open_store(str(folder / "idle")))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [4, 3, 1]
