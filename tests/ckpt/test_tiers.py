from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.config import Config
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import InvalidRequest, RunVanished, SaveSkipped, StoreFull, StoreUnavailable, Superseded
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import open_store
from ckptstore.tiers.replication import replication_queue
from ckptstore.tiers.source import TieredSource
from tests.support.checkpoints import flip
from tests.support.command_line import invoke, succeed
from tests.support.disks import small_file_system
from tests.support.parallel.runner import Scenario, run_scenarios
from tests.support.stores import Faults, FaultyStore
from tests.support.waiting import present, wait_until


class Host:
    """A host with a local folder of its own, and the remote folder of all hosts."""

    def __init__(self, folder: Path, name: str = "local", **knobs: Any) -> None:
        self.local, self.remote = folder / name, folder / "remote"
        self.knobs = knobs
        self.model = nn.ParameterDict({"w": torch.zeros(50_000), "frozen": torch.ones(50_000, dtype=torch.float64)})

    def start(self, **knobs: Any) -> Checkpointer:
        knobs = {"retry_s": 0.5, "writer": "thread", **self.knobs, **knobs}
        return Checkpointer(str(self.remote), run="gpt", **{"local": str(self.local), **knobs})

    def save(self, checkpointer: Checkpointer, step: int) -> None:
        with torch.no_grad():
            self.model["w"].fill_(step)
        saved = checkpointer.save(self.model, None, step)
        assert (saved.step, saved.tiers) == (step, ("local",))

    def run(self, tier: str) -> Run:
        return Run(open_store(str(getattr(self, tier))), "gpt")

    def steps(self, tier: str) -> list[int]:
        return [c.step for c in list_checkpoints(self.run(tier))]

    def resumes(self, checkpointer: Checkpointer, step: int) -> dict[str, int]:
        """Where the bytes were read."""
        restored = present(checkpointer.restore(self.model))
        assert restored.step == step
        assert torch.equal(self.model["w"], torch.full((50_000,), float(step)))
        return restored.read


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_every_save_is_local_and_each_third_and_the_last_remote(host: Host) -> None:
    with host.start(replicate_every=3, local_keep=2) as checkpointer:
        for step in range(1, 9):
            host.save(checkpointer, step)
    assert (host.steps("remote"), host.steps("local")[:2]) == ([8, 7, 4, 1], [8, 7])
    assert all(verify(StoreSource(host.run("remote").store), c).ok for c in list_checkpoints(host.run("remote")))
    assert replication_queue(host.run("local"), {}) == []
    with host.start() as checkpointer:
        newest = present(checkpointer.latest())
        assert (newest.step, newest.tiers) == (8, ("local", "remote"))
        read = host.resumes(checkpointer, 8)
    assert read["store"] == 0
    assert read["local"] >= 600_000


def test_a_host_without_local_checkpoints_reads_the_remote_ones(host: Host, tmp_path: Path) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)
    other = Host(tmp_path, "other")
    with other.start() as checkpointer:
        assert other.resumes(checkpointer, 2)["store"] >= 600_000
        other.save(checkpointer, 3)
    assert host.steps("remote") == [3, 2, 1]
    with host.start() as checkpointer:  # back on the first host
        host.resumes(checkpointer, 3)
        host.save(checkpointer, 4)
    assert [(c.attempt.generation, c.step, str(c.state)) for c in list_checkpoints(host.run("remote"))] == [
        (3, 4, "committed"), (2, 3, "committed"), (1, 2, "committed"), (1, 1, "committed")
    ]  # fmt: skip


def test_a_damaged_local_chunk_is_read_remotely(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    [shard] = host.local.rglob("*.ckpt")
    flip(shard, 10)
    with host.start() as checkpointer:
        read = host.resumes(checkpointer, 1)
    assert min(read.values()) > 0
    shard.unlink()
    with host.start() as checkpointer:
        assert host.resumes(checkpointer, 1)["local"] == 0


def test_another_trainer_went_on_while_the_remote_store_was_away(host: Host, tmp_path: Path) -> None:
    away = tmp_path / "away"
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: host.steps("remote") == [1])
        host.remote.rename(away)  # cut off
        other = Host(tmp_path, "other")
        other.remote = away
        with other.start() as elsewhere:
            other.resumes(elsewhere, 1)
            other.save(elsewhere, 2)
        host.save(checkpointer, 5)
        away.rename(host.remote)
        steps = count(6)

        def is_superseded() -> bool:
            try:
                host.save(checkpointer, next(steps))
            except Superseded:
                return True
            return False

        wait_until(is_superseded)
    assert [(c.attempt.generation, c.step) for c in list_checkpoints(host.run("remote"))] == [(2, 2), (1, 1)]
    with host.start() as checkpointer:  # what went on counts, although 5 is local
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
        five = checkpointer._source.find(Reference("gpt", 5))
        assert (str(five.state), five.tiers) == ("abandoned", ("local",))
    assert host.steps("remote") == [3, 2, 1]


def test_a_job_that_was_superseded_after_its_last_save_ends_with_an_error(host: Host, tmp_path: Path) -> None:
    checkpointer = host.start()
    host.save(checkpointer, 1)
    wait_until(lambda: host.steps("remote") == [1])
    other = Host(tmp_path, "other")
    with other.start() as elsewhere:
        other.resumes(elsewhere, 1)
        other.save(elsewhere, 2)
    host.save(checkpointer, 5)
    client = present(checkpointer._saves.client)
    wait_until(lambda: client.unreplicable)
    with pytest.raises(Superseded, match="another trainer has begun generation 2"):
        checkpointer.wait()
    with pytest.raises(Superseded, match="another trainer has begun generation 2"):
        checkpointer.close()
    assert host.steps("remote") == [2, 1]


@pytest.mark.parametrize("forgets", [False, True])
def test_nothing_is_written_below_a_remote_mount_point_although_the_host_forgot(
    host: Host, forgets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt.config.HEARTBEAT_S", 0.05)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    if forgets:
        shutil.rmtree(tmp_path / "tmp" / f"ckpt-{os.getuid()}")
    host.remote.rename(tmp_path / "unmounted")
    host.remote.mkdir()
    with host.start() as checkpointer:
        host.resumes(checkpointer, 1)
        host.save(checkpointer, 2)
    assert ([*host.remote.iterdir()], replication_queue(host.run("local"), {})[-1].step) == ([], 2)
    host.remote.rmdir()
    (tmp_path / "unmounted").rename(host.remote)
    with host.start() as checkpointer:
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
    assert host.steps("remote") == [3, 2, 1]


def test_a_local_volume_that_is_not_mounted_is_an_error(host: Host, tmp_path: Path) -> None:
    """Training would go back to the last replicated step, and what was saved after it would be abandoned."""
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: host.steps("remote") == [1])
        host.remote.rename(tmp_path / "away")
        host.save(checkpointer, 2)
        host.save(checkpointer, 3)
    (tmp_path / "away").rename(host.remote)
    host.local.rename(tmp_path / "unmounted")
    host.local.mkdir()
    begins: list[Callable[[Checkpointer], object]] = [
        lambda one: one.restore(host.model),
        lambda one: one.save(host.model, None, 4),
        lambda one: one.prepare(host.model, None),
    ]
    stores: list[dict[str, Any]] = [{}, {"local": str(tmp_path / "another")}, {"local": None}]
    for knobs in stores:
        with host.start(**knobs) as checkpointer:
            for begin in begins:
                with pytest.raises(RunVanished, match="step 3 of run 'gpt' was saved on this host to") as caught:
                    begin(checkpointer)
    assert f"local='file://{host.local}'" in caught.value.hint
    assert host.steps("remote") == [1]
    with host.start() as checkpointer:  # it is lost
        assert checkpointer.restore(host.model, checkpoint=1) is not None
        host.save(checkpointer, 4)
    shutil.rmtree(host.local)
    with host.start() as checkpointer:
        host.resumes(checkpointer, 4)  # all of it is remote: no question


def test_nothing_local_and_the_remote_store_away_is_an_error(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    shutil.rmtree(host.local)
    with host.start() as checkpointer:
        source = checkpointer._source
        host.remote.rename(host.remote.with_name("away"))
        with pytest.raises(StoreUnavailable):
            checkpointer.restore(host.model)
        assert source.url.endswith("remote")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"local": "http://localhost:1"}, "two stores"), ({"local": "/remote"}, "the same"),
        ({"replicate_every": 0}, "replicate_every 0"), ({"local_keep": 0}, "local_keep 0"),
    ],
)  # fmt: skip
def test_wrong_knobs(knobs: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Config("/remote", run="gpt", **{"local": "/local", **knobs})  # type: ignore[arg-type]


def test_the_training_thread_uses_no_store_after_the_first_save(host: Host) -> None:
    with host.start() as checkpointer:
        source, calls = checkpointer._source, Faults()
        assert isinstance(source, TieredSource)
        source.local.store = FaultyStore(source.local.store, calls)
        source.store = FaultyStore(source.store, calls)
        source._quick.store = FaultyStore(source._quick.store, calls)
        host.save(checkpointer, 1)
        before = list(calls.calls)
        assert {call.split()[1] for call in before} == {"_near/id"}
        for step in range(2, 6):
            host.save(checkpointer, step)
        assert calls.calls == before
    assert host.steps("remote") == [5, 4, 3, 2, 1]


SIZE = 600_000
"""Bytes of a checkpoint without compression and references."""


@pytest.fixture
def away(host: Host) -> Callable[[], object]:
    """The remote store is away until the function is called."""
    host.remote.write_text("not a folder")

    def back() -> None:
        host.remote.unlink()
        host.remote.mkdir(exist_ok=True)  # a saver may be first

    return back


def test_a_full_local_tier_skips_saves_if_asked_to(host: Host, away: Callable[[], object]) -> None:
    host.knobs = {"local_bytes": 3 * SIZE, "local_keep": 1, "compress": "off", "max_references": 0}
    with host.start(on_busy="skip") as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)
        with pytest.raises(SaveSkipped, match="at most"):
            host.save(checkpointer, 3)
        first, second = replication_queue(host.run("local"), {})
        counted = checkpointer.counters
        assert (counted.local_only, counted.local_only_bytes) == (2, first.needed_bytes + second.needed_bytes)
        assert counted.local_only_since == first.committed_at
        away()
        attempts = host.local / "gpt" / "attempts"
        wait_until(lambda: len(list(attempts.glob("*/*.ckpt"))) == 1)  # 1 is remote, and gone here
        host.save(checkpointer, 4)
        wait_until(lambda: checkpointer.counters.local_only == 0)
        assert checkpointer.counters.local_only_since is None
    assert host.steps("remote") == [4, 2, 1]


@pytest.mark.parametrize("limit", ["setting", "disk"])
def test_a_full_local_tier_is_waited_for(host: Host, away: Callable[[], object], limit: str) -> None:
    host.knobs = {"local_keep": 1, "compress": "off", "max_references": 0}
    if limit == "setting":
        host.knobs["local_bytes"] = 3 * SIZE
    with nullcontext() if limit == "setting" else small_file_system(host.local, "1500k"), host.start() as checkpointer:
        for step in (1, 2):
            host.save(checkpointer, step)
        third = checkpointer.save_async(host.model, None, 3)
        with pytest.raises(TimeoutError):
            third.result(timeout=1.0)
        away()
        assert third.result(timeout=60.0).step == 3
    assert host.steps("remote") == [3, 2, 1]


def test_a_local_tier_that_can_never_hold_the_state(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.saver.replicator._IDLE_S", 0.0)
    with host.start(local_bytes=1000, writer="thread") as checkpointer, pytest.raises(StoreFull, match="needs up to"):
        host.save(checkpointer, 1)


def test_the_command_line_shows_where_checkpoints_are(host: Host) -> None:
    with host.start(replicate_every=2, local_keep=1, max_references=0) as checkpointer:
        for step in (1, 2, 3):
            host.save(checkpointer, step)
        wait_until(lambda: host.steps("remote") == [3, 1])
        host.save(checkpointer, 4)
        wait_until(lambda: host.steps("local") == [4])
        stores = ("--store", host.remote, "--local", host.local)
        where = {body["step"]: body["tiers"] for body in invoke("ls", "gpt", *stores, "-o", "json").json}
        assert where == {4: ["local"], 3: ["remote"], 1: ["remote"]}
        assert "WHERE" in invoke("ls", "gpt", *stores).stdout
        assert "WHERE" not in invoke("ls", "gpt", "--store", host.remote).stdout
        assert "local" in succeed("show", "gpt@4", *stores).stdout.split("where")[1].splitlines()[0]
        away = host.remote.rename(host.remote.with_name("away"))
        assert invoke("latest", "gpt", *stores, "-o", "json").json["tiers"] == ["local"]
        refused = invoke("ls", "gpt", "--url", "http://127.0.0.1:1", "--local", host.local)
        assert "--local needs a store" in refused.stderr
        away.rename(host.remote)


def test_a_remote_store_that_refuses_for_a_while(host: Host) -> None:
    """As one whose credentials have expired: the error is not an outage, and saves go on all the same."""

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(host.remote)], check=True)

    with small_file_system(host.remote, "20m"), host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: checkpointer.counters.local_only == 0)
        remount("ro")
        host.save(checkpointer, 2)
        host.save(checkpointer, 3)
        assert checkpointer.counters.local_only == 2
        remount("rw")
        wait_until(lambda: checkpointer.counters.local_only == 0)
        assert host.steps("remote") == [3, 2, 1]


def test_ranks_on_one_local_tier_and_on_two(tmp_path: Path) -> None:
    scenarios = [
        Scenario(f"{__name__}:save_and_restore", 2, {"folder": str(tmp_path), "own": own}) for own in (False, True)
    ]
    together, apart = run_scenarios(scenarios, tmp_path / "ranks", together=True)
    assert together.result() == [{"steps": [1, 2], "remote": [2, 1], "local_only": True}] * 2
    assert [found["error"].partition(" on ")[0] for found in apart.result()] == ["rank 1"] * 2


def save_and_restore(folder: str, own: bool) -> dict[str, Any]:
    """Save two steps with a state of each rank, and restore the last. own: each rank has a local folder of its own."""
    rank = dist.get_rank()
    local, remote = Path(folder) / (f"local-{rank}" if own else "local"), Path(folder) / f"remote-{own}"
    model = nn.ParameterDict({f"part-{rank}": torch.zeros(1000)})
    steps: list[int] = []
    with Checkpointer(str(remote), run="gpt", local=str(local), retry_s=5.0) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                model[f"part-{rank}"].fill_(step + rank)
            try:
                steps.append(checkpointer.save(model, None, step).step)
            except InvalidRequest as error:
                return {"error": error.message}
    dist.barrier()
    with Checkpointer(str(remote), run="gpt", local=str(local)) as checkpointer:
        restored = present(checkpointer.restore(model))
        assert torch.equal(model[f"part-{rank}"], torch.full((1000,), 2.0 + rank))
    listed = list_checkpoints(Run(open_store(str(remote)), "gpt"))
    return {"steps": steps, "remote": [c.step for c in listed], "local_only": restored.read["store"] == 0}
