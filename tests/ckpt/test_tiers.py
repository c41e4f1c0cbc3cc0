"""A near store beside the far one: saves are committed near at once, and carried far in the background."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.config import Config
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import InvalidRequest, SaveSkipped, StoreFull, StoreUnavailable, Superseded
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.tiers.carrying import backlog
from ckptstore.tiers.source import TieredSource
from tests.support.command_line import invoke
from tests.support.disks import small_file_system
from tests.support.parallel.runner import Scenario, run_scenarios
from tests.support.stores import Faults, FaultyStore
from tests.support.waiting import wait_until


class Host:
    """A host with a near folder of its own, and the far folder of all hosts."""

    def __init__(self, folder: Path, name: str = "near", **knobs: Any) -> None:
        self.near, self.far = folder / name, folder / "far"
        self.knobs = knobs
        self.model = nn.ParameterDict({"w": torch.zeros(50_000), "frozen": torch.ones(50_000, dtype=torch.float64)})

    def start(self, **knobs: Any) -> Checkpointer:
        knobs = {"retry_s": 0.5} | self.knobs | knobs
        return Checkpointer(str(self.far), run="gpt", **{"near": str(self.near), **knobs})

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        with torch.no_grad():
            self.model["w"].fill_(step)
        saved = checkpointer.save(self.model, None, step)
        assert (saved.step, saved.tiers) == (step, ("near",))

    def run(self, tier: str) -> Run:
        return Run(open_store(str(getattr(self, tier))), "gpt")

    def steps(self, tier: str) -> list[int]:
        return [c.step for c in list_checkpoints(self.run(tier))]

    def resumes(self, checkpointer: Checkpointer, step: int) -> dict[str, int]:
        """Where the bytes were read."""
        restored = checkpointer.restore(self.model)
        assert restored is not None
        assert restored.step == step
        assert torch.equal(self.model["w"], torch.full((50_000,), float(step)))
        return restored.read


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_every_save_is_near_and_each_third_and_the_last_far(host: Host) -> None:
    with host.start(far_every=3, near_keep=2) as checkpointer:
        for step in range(1, 9):
            host.save(checkpointer, step)
    assert host.steps("far") == [8, 7, 4, 1]
    near = host.steps("near")
    assert near[:2] == [8, 7]
    assert all(verify(StoreSource(host.run("far").store), c).ok for c in list_checkpoints(host.run("far")))
    assert backlog(host.run("near")).attempts == ()
    with host.start() as checkpointer:
        newest = checkpointer.latest()
        assert newest is not None
        assert (newest.step, newest.tiers) == (8, ("near", "far"))
        read = host.resumes(checkpointer, 8)
    assert read["store"] == 0
    assert read["near"] >= 600_000


def test_a_host_without_near_checkpoints_reads_the_far_ones(host: Host, tmp_path: Path) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)
    other = Host(tmp_path, "other")
    with other.start() as checkpointer:
        read = other.resumes(checkpointer, 2)
        assert read["store"] >= 600_000
        other.save(checkpointer, 3)
    assert host.steps("far") == [3, 2, 1]
    with host.start() as checkpointer:  # back on the first host
        host.resumes(checkpointer, 3)
        host.save(checkpointer, 4)
    assert [(c.attempt.generation, c.step, str(c.state)) for c in list_checkpoints(host.run("far"))] == [
        (3, 4, "committed"), (2, 3, "committed"), (1, 2, "committed"), (1, 1, "committed")
    ]  # fmt: skip


def test_a_damaged_near_chunk_is_read_far(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    [shard] = host.near.rglob("*.ckpt")
    data = bytearray(shard.read_bytes())
    data[10] ^= 1
    shard.write_bytes(data)
    with host.start() as checkpointer:
        read = host.resumes(checkpointer, 1)
    assert min(read.values()) > 0
    shard.unlink()
    with host.start() as checkpointer:
        assert host.resumes(checkpointer, 1)["near"] == 0


def test_another_trainer_went_on_while_the_far_store_was_away(host: Host, tmp_path: Path) -> None:
    away = tmp_path / "away"
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: host.steps("far") == [1])
        host.far.rename(away)  # cut off
        other = Host(tmp_path, "other")
        other.far = away
        with other.start() as elsewhere:
            other.resumes(elsewhere, 1)
            other.save(elsewhere, 2)
        host.save(checkpointer, 5)
        away.rename(host.far)
        steps = count(6)

        def is_superseded() -> bool:
            try:
                host.save(checkpointer, next(steps))
            except Superseded:
                return True
            return False

        wait_until(is_superseded)
    assert [(c.attempt.generation, c.step) for c in list_checkpoints(host.run("far"))] == [(2, 2), (1, 1)]
    with host.start() as checkpointer:  # what went on counts, although 5 is near
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
        five = checkpointer._source.find(Reference("gpt", 5))
        assert (str(five.state), five.tiers) == ("abandoned", ("near",))
    assert host.steps("far") == [3, 2, 1]


def test_nothing_near_and_the_far_store_away_is_an_error(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    shutil.rmtree(host.near)
    with host.start() as checkpointer:
        source = checkpointer._source
        host.far.rename(host.far.with_name("away"))
        with pytest.raises(StoreUnavailable):
            checkpointer.restore(host.model)
        assert source.url.endswith("far")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"near": "http://localhost:1"}, "two stores"),
        ({"near": "/far"}, "the same"),
        ({"far_every": 0}, "far_every 0"),
        ({"near_keep": 0}, "near_keep 0"),
    ],
)
def test_wrong_knobs(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Config("/far", run="gpt", **{"near": "/near", **knobs})  # type: ignore[arg-type]


def test_the_training_thread_uses_no_store_after_the_first_save(host: Host) -> None:
    with host.start() as checkpointer:
        source, calls = checkpointer._source, Faults()
        assert isinstance(source, TieredSource)
        source.near.store = FaultyStore(source.near.store, calls)
        source.store = FaultyStore(source.store, calls)
        source._quick.store = FaultyStore(source._quick.store, calls)
        host.save(checkpointer, 1)
        before = list(calls.calls)
        assert {call.split()[1] for call in before} == {"_near/id"}
        for step in range(2, 6):
            host.save(checkpointer, step)
        assert calls.calls == before
    assert host.steps("far") == [5, 4, 3, 2, 1]


SIZE = 600_000
"""Bytes of a checkpoint without compression and references."""


@pytest.fixture
def away(host: Host) -> Callable[[], object]:
    """The far store is away until the function is called."""
    host.far.write_text("not a folder")

    def back() -> None:
        host.far.unlink()
        host.far.mkdir()

    return back


def test_a_full_near_store_skips_saves_if_asked_to(host: Host, away: Callable[[], object]) -> None:
    host.knobs = {"near_bytes": 3 * SIZE, "near_keep": 1, "compress": "off", "max_references": 0}
    with host.start(on_busy="skip") as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)
        with pytest.raises(SaveSkipped, match="at most"):
            host.save(checkpointer, 3)
        waiting = backlog(host.run("near"))
        assert len(waiting.attempts) == 2
        counted = checkpointer.counters
        assert (counted.near_only, counted.near_only_bytes) == (2, waiting.bytes)
        assert counted.near_only_since == waiting.since
        away()
        attempts = host.near / "gpt" / "attempts"
        wait_until(lambda: len(list(attempts.glob("*/*.ckpt"))) == 1)  # 1 is far, and gone here
        host.save(checkpointer, 4)
        wait_until(lambda: checkpointer.counters.near_only == 0)
        assert checkpointer.counters.near_only_since is None
    assert host.steps("far") == [4, 2, 1]


def test_a_full_near_store_is_waited_for(host: Host, away: Callable[[], object]) -> None:
    knobs = {"near_bytes": 3 * SIZE, "near_keep": 1, "compress": "off", "max_references": 0}
    with host.start(**knobs) as checkpointer:
        for step in (1, 2):
            host.save(checkpointer, step)
        third = checkpointer.save_async(host.model, None, 3)
        with pytest.raises(TimeoutError):
            third.result(timeout=1.0)
        away()
        assert third.result(timeout=60.0).step == 3
    assert host.steps("far") == [3, 2, 1]


def test_a_near_store_that_can_never_hold_the_state(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.saver.carrier._IDLE_S", 0.0)
    with host.start(near_bytes=1000, writer="thread") as checkpointer, pytest.raises(StoreFull, match="needs up to"):
        host.save(checkpointer, 1)


def test_a_full_disk_is_waited_for(host: Host, away: Callable[[], object]) -> None:
    with (
        small_file_system(host.near, "1500k"),
        host.start(near_keep=1, compress="off", max_references=0) as checkpointer,
    ):
        for step in (1, 2):
            host.save(checkpointer, step)
        third = checkpointer.save_async(host.model, None, 3)
        with pytest.raises(TimeoutError):
            third.result(timeout=1.0)
        away()
        assert third.result(timeout=60.0).step == 3
    assert host.steps("far") == [3, 2, 1]


def test_the_command_line_shows_where_checkpoints_are(host: Host) -> None:
    with host.start(far_every=2, near_keep=1, max_references=0) as checkpointer:
        for step in (1, 2, 3):
            host.save(checkpointer, step)
        wait_until(lambda: host.steps("far") == [3, 1])
        host.save(checkpointer, 4)
        wait_until(lambda: host.steps("near") == [4])
        stores = ("--store", host.far, "--near", host.near)
        listed = invoke("ls", "gpt", *stores, "-o", "json").json
        where = {body["step"]: body["tiers"] for body in listed}
        assert where == {4: ["near"], 3: ["far"], 1: ["far"]}
        assert "WHERE" in invoke("ls", "gpt", *stores).stdout
        assert "WHERE" not in invoke("ls", "gpt", "--store", host.far).stdout
        shown = invoke("show", "gpt@4", *stores)
        assert shown.code == 0, shown.stderr
        assert "near" in shown.stdout.split("where")[1].splitlines()[0]
        away = host.far.rename(host.far.with_name("away"))
        assert invoke("latest", "gpt", *stores, "-o", "json").json["tiers"] == ["near"]
        refused = invoke("ls", "gpt", "--url", "http://127.0.0.1:1", "--near", host.near)
        assert "--near needs a store" in refused.stderr
        away.rename(host.far)


def test_a_far_store_that_refuses_for_a_while(host: Host) -> None:
    """As one whose credentials have expired: the error is not an outage, and saves go on all the same."""

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(host.far)], check=True)

    with small_file_system(host.far, "20m"), host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: checkpointer.counters.near_only == 0)
        remount("ro")
        host.save(checkpointer, 2)
        host.save(checkpointer, 3)
        assert checkpointer.counters.near_only == 2
        remount("rw")
        wait_until(lambda: checkpointer.counters.near_only == 0)
        assert host.steps("far") == [3, 2, 1]


def test_ranks_on_one_near_store_and_on_two(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    scenarios = [
        Scenario("tests.ckpt.near_ranks:save_and_restore", 2, {"folder": str(tmp_path), "own": own})
        for own in (False, True)
    ]
    together, apart = run_scenarios(scenarios, tmp_path / "ranks", together=True)
    assert together.result() == [{"steps": [1, 2], "far": [2, 1], "near_only": True}] * 2
    assert [found["error"].partition(" on ")[0] for found in apart.result()] == ["rank 1"] * 2
