from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.saver.commit import Numbering
from ckpt.saver.replicator import Replicator
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
from ckptstore.tiers.replication import UNREPLICABLE, queued, unreplicable
from ckptstore.tiers.source import TieredSource
from tests.ckpt.saver.attempts import new_setup
from tests.ckpt.test_tiers import Host
from tests.ckptstore.tiers.test_replication import Tiers
from tests.support.stores import Faults, FaultyStore, Interleaving
from tests.support.waiting import wait_until


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_saves_after_a_checkpoint_that_cannot_be_replicated_are_remote_again(host: Host) -> None:
    host.remote.write_text("not a folder")
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        host.save(checkpointer, 2)  # references what does not change in 1
        first = min(list_checkpoints(host.run("local")), key=lambda c: c.step)
        [shard] = (host.local / "gpt" / "attempts" / str(first.attempt)).glob("*.ckpt")
        shard.write_bytes(bytes(shard.stat().st_size))
        host.remote.unlink()
        host.remote.mkdir(exist_ok=True)  # a saver may be first
        wait_until(lambda: len(unreplicable(host.run("local"))) == 2)
        host.save(checkpointer, 3)
    assert host.steps("remote") == [3]
    assert verify(StoreSource(host.run("remote").store), list_checkpoints(host.run("remote"))[0]).ok


def test_an_error_that_may_pass_marks_nothing_unreplicable(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
        wait_until(lambda: not queued(host.run("local")))
        remote = host.run("remote")
        newer = Generation(
            format=99, kind="generation", run="gpt", number=2, session="", parent=None, by="a newer program", at=0.0
        )
        remote.store.put(remote.keys.generation(2), seal(newer))
        host.save(checkpointer, 2)
        checkpointer.wait()
    assert list(pinned(host.run("local")).values()) == [["far"]]
    assert UNREPLICABLE not in str(pinned(host.run("local")))
    remote.store.delete_many([remote.keys.generation(2)])
    with host.start() as checkpointer:
        host.resumes(checkpointer, 2)
        host.save(checkpointer, 3)
    assert host.steps("remote") == [3, 2, 1]


def test_a_restore_that_fails_forgets_nothing_of_what_an_earlier_one_saw(host: Host) -> None:
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    shutil.rmtree(host.local)
    with host.start() as checkpointer:
        host.resumes(checkpointer, 1)
        with pytest.raises(NoCheckpoint):
            checkpointer.restore(host.model, checkpoint=99)
        host.save(checkpointer, 2)
    assert [(c.attempt.generation, c.step) for c in list_checkpoints(host.run("remote"))] == [(2, 2), (1, 1)]


def test_the_remote_store_goes_away_within_a_restore(host: Host, tmp_path: Path) -> None:
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
    assert host.steps("remote") == [3, 2, 1]


class Noted(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.set()
        return super().wait(timeout)


def test_nothing_is_replicated_while_a_save_is_urgent(host: Host) -> None:
    host.remote.write_text("not a folder")
    with host.start() as checkpointer:
        host.save(checkpointer, 1)
    host.remote.unlink()
    local, paused, events = host.run("local"), threading.Event(), list[str]()
    remote_store = FaultyStore(host.run("remote").store, Interleaving(0, lambda: paused.wait(60)))
    setup = new_setup(local.store.url, run="gpt", remote=remote_store.url, local_keep=9)
    replicator = Replicator(
        local, Run(remote_store, "gpt"), setup, Numbering(local, events.append), lambda _: None,
        lambda attempt: events.append(f"{attempt.step} is remote"),
    )  # fmt: skip
    replicator._unpaused = Noted()
    replicator.pause()
    paused.set()
    assert replicator._unpaused.asked.wait(60), "it has begun to copy"
    events.append("the urgent save is local")
    replicator.committed(list_checkpoints(local)[0].attempt)
    replicator.finish()
    assert events == ["the urgent save is local", "1 is remote"]


def test_what_a_killed_saver_has_not_pinned_is_replicated_though_the_next_one_has_saved(tmp_path: Path) -> None:
    tiers = Tiers(tmp_path)
    last = tiers.save(1, tiers.begin())  # committed, and not pinned
    numbering = Numbering(tiers.local, print)
    resumed = NewAttempt(Session(new_ulid(system_clock()), last.attempt, 0), 2, new_ulid(system_clock()))
    tiers.save(2, numbering.attempt(resumed).generation)
    setup = new_setup("", run="gpt", remote=f"file://{tmp_path}", local_keep=1)
    Replicator(tiers.local, tiers.remote, setup, numbering, lambda _: None, lambda _: None).finish()
    assert [c.step for c in list_checkpoints(tiers.remote)] == [1]
