"""Carrier: what waits, what is stranded, and what a stranded checkpoint does to those after it."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.saver.carrier import Carrier
from ckpt.saver.commit import Numbering
from ckpt.saver.messages import Setup
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.errors import NoCheckpoint
from ckptstore.format.documents import Generation
from ckptstore.format.parsing import seal
from ckptstore.names import new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.pins import pinned
from ckptstore.run import Run
from ckptstore.tiers.carrying import STRANDED, queued, stranded
from ckptstore.tiers.source import TieredSource
from tests.ckpt.test_tiers import Host
from tests.ckptstore.tiers.test_carrying import Tiers
from tests.support.stores import Faults, FaultyStore, Interleaving
from tests.support.waiting import wait_until


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_saves_after_a_checkpoint_that_cannot_be_carried_are_far_again(host: Host) -> None:
    host.far.write_text("not a folder")
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)  # references what does not change in 1
        first = min(list_checkpoints(host.run("near")), key=lambda c: c.step)
        [shard] = (host.near / "gpt" / "attempts" / str(first.attempt)).glob("*.ckpt")
        shard.write_bytes(bytes(shard.stat().st_size))
        host.far.unlink()
        host.far.mkdir()
        wait_until(lambda: len(stranded(host.run("near"))) == 2)
        host.save(checkpointer, 3)
    assert host.steps("far") == [3]
    assert verify(StoreSource(host.run("far").store), list_checkpoints(host.run("far"))[0]).ok


def test_a_far_volume_that_is_not_mounted_gets_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.config.HEARTBEAT_S", 0.05)
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    volume = host.far.rename(host.far.with_name("volume"))
    host.far.mkdir()  # the folder below the mount point
    with host.start() as checkpointer:
        host.resumes(checkpointer, 1)
        host.save(checkpointer, 2)
    assert [str(p) for p in host.far.rglob("*")] == []
    assert len(queued(host.run("near"))) == 2
    host.far.rmdir()
    volume.rename(host.far)
    with host.start() as checkpointer:
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
    assert host.steps("far") == [3, 2, 1]


def test_an_error_that_may_pass_strands_nothing(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: not queued(host.run("near")))
        far = host.run("far")
        newer = Generation(
            format=99, kind="generation", run="gpt", number=2, session="", parent=None, by="a newer program", at=0.0
        )
        far.store.put(far.keys.generation(2), seal(newer))
        host.save(checkpointer, 2)
        checkpointer.wait()
    assert list(pinned(host.run("near")).values()) == [["far"]]
    assert STRANDED not in str(pinned(host.run("near")))
    far.store.delete_many([far.keys.generation(2)])
    with host.start() as checkpointer:
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
    assert host.steps("far") == [3, 2, 1]


def test_a_restore_that_fails_forgets_nothing_of_what_an_earlier_one_saw(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    shutil.rmtree(host.near)
    with host.start() as checkpointer:
        host.resumes(checkpointer, 1)
        with pytest.raises(NoCheckpoint):
            checkpointer.restore(host.model, checkpoint=99)
        host.save(checkpointer, 2)
    assert [(c.attempt.generation, c.step) for c in list_checkpoints(host.run("far"))] == [(2, 2), (1, 1)]


def test_the_far_store_goes_away_within_a_restore(host: Host, tmp_path: Path) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    other = Host(tmp_path, "other")
    with other.start() as checkpointer:
        other.resumes(checkpointer, 1)
        other.save(checkpointer, 2)

    def resume_with(faults: Faults, checkpointer: Checkpointer) -> None:
        source = checkpointer._source
        assert isinstance(source, TieredSource)
        source._quick.store = FaultyStore(source._quick.store, faults)
        host.resumes(checkpointer, 2)

    calls = Faults()
    with host.start() as checkpointer:
        resume_with(calls, checkpointer)
    last = max(number for number, call in enumerate(calls.calls) if "generations" in call)
    with host.start() as checkpointer:
        resume_with(Faults(last), checkpointer)
        host.save(checkpointer, 3)
    assert host.steps("far") == [3, 2, 1]


class Noted(threading.Event):
    """An event that notes that a thread waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.set()
        return super().wait(timeout)


def test_nothing_is_carried_while_a_save_is_urgent(host: Host) -> None:
    host.far.write_text("not a folder")
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    host.far.unlink()
    near, paused, events = host.run("near"), threading.Event(), list[str]()
    far_store = FaultyStore(host.run("far").store, Interleaving(0, lambda: paused.wait(60)))
    setup = Setup(
        store=near.store.url, options={}, run="gpt", rank=0, world_size=1, compress="off", peer_timeout_s=20.0,
        daemon=None, token=None, far=far_store.url, near_keep=9,
    )  # fmt: skip
    carrier = Carrier(
        near, Run(far_store, "gpt"), setup, Numbering(near, events.append), lambda _: None,
        lambda attempt: events.append(f"{attempt.step} is far"),
    )  # fmt: skip
    carrier._unpaused = Noted()
    carrier.pause()
    paused.set()
    assert carrier._unpaused.asked.wait(60), "it has begun to copy"
    events.append("the urgent save is near")
    carrier.committed(list_checkpoints(near)[0].attempt)
    carrier.finish()
    assert events == ["the urgent save is near", "1 is far"]


def test_what_a_killed_saver_has_not_pinned_is_carried_though_the_next_one_has_saved(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    last = tiers.save(1, tiers.begin())  # committed, and not pinned
    numbering = Numbering(tiers.near, print)
    resumed = NewAttempt(Session(new_ulid(system_clock()), last.attempt, 0), 2, new_ulid(system_clock()))
    tiers.save(2, numbering.attempt(resumed).generation)
    setup = Setup(
        store="", options={}, run="gpt", rank=0, world_size=1, compress="off", peer_timeout_s=1.0, daemon=None,
        token=None, far=f"file://{tmp_path}", near_keep=1,
    )  # fmt: skip
    Carrier(tiers.near, tiers.far, setup, numbering, lambda _: None, lambda _: None).finish()
    assert [c.step for c in list_checkpoints(tiers.far)] == [1]
