"""SIGKILL of trainer, saver, daemon and everything at random moments: what is listed is always whole.

CKPTD_KILLS says how many there are.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from ckpt.restoring.pipeline import load_tensors
from ckptstore.clock import system_clock
from ckptstore.errors import NoCheckpoint
from ckptstore.format.records import Policy
from ckptstore.names import RunKeys
from ckptstore.reading.source import Source, StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.daemons import Daemon, running_daemon
from tests.support.kill_train import weights
from tests.support.trainers import Trainer, is_alive
from tests.support.waiting import wait_until

ROUNDS = int(os.environ.get("CKPTD_KILLS", "14"))
VICTIMS = {"trainer": 3, "saver": 5, "daemon": 2, "everything": 3}


class Cluster:
    """One trainer with its saver, and one daemon, on one store; whatever is dead is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons = ExitStack()
        self.daemon = self._start_daemon()
        self.trainer = Trainer(folder / "store", self.daemon.url)

    def revive(self) -> None:
        if self.daemon.process.poll() is not None:
            self.daemon = self._start_daemon()
        if self.trainer.process.poll() is not None:
            self.trainer = Trainer(self.folder / "store", self.daemon.url)

    def kill(self, victim: str) -> None:
        deaths = self.trainer.deaths
        if victim in ("saver", "everything"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.trainer.saver, signal.SIGKILL)
        if victim in ("daemon", "everything"):
            self.daemon.kill()
        if victim in ("trainer", "everything"):
            self.trainer.kill()
        if victim == "saver":
            wait_until(lambda: self.trainer.deaths > deaths)

    def _start_daemon(self) -> Daemon:
        database = f"sqlite:///{self.folder}/index.db"
        return self.daemons.enter_context(running_daemon(str(self.folder / "store"), database))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    found.trainer.kill()
    found.daemons.close()


def latest_step(source: Source) -> int:
    try:
        return source.latest("kill").step
    except NoCheckpoint:
        return 0


@pytest.mark.slow
def test_random_kills_never_tear_a_checkpoint(cluster: Cluster) -> None:
    store = open_store(str(cluster.folder / "store"))
    source, dice = StoreSource(store), random.Random(20)
    plan = dice.choices(list(VICTIMS), list(VICTIMS.values()), k=ROUNDS)
    assert {plan.count(victim) for victim in VICTIMS}.isdisjoint({0, 1})
    reached = 0
    for victim in plan:
        cluster.revive()
        cluster.trainer.wait_for_save()
        time.sleep(dice.random() * 0.15)
        cluster.kill(victim)
        for checkpoint in source.checkpoints("kill")[:3]:
            assert verify(source, checkpoint).ok
            stored = load_tensors(source, checkpoint, "model/w")["model/w"]
            assert torch.equal(stored, weights(checkpoint.step))
        # The trainer never resumed from anything but the weights of its step: it would have ended with status 9.
        assert cluster.trainer.process.poll() in (None, -signal.SIGKILL)
        assert latest_step(source) >= reached
        reached = latest_step(source)
        apply_prune(Run(store, "kill"), plan_prune(Run(store, "kill"), Policy(4)))

    cluster.revive()
    cluster.trainer.kill()
    wait_until(lambda: not is_alive(cluster.trainer.saver))
    collect(Run(store, "kill", lambda: system_clock() + 1), grace_s=0.5)
    left = {str(checkpoint.attempt) for checkpoint in source.checkpoints("kill")}
    assert set(store.list_folders(RunKeys("kill").attempts)) == left
    with cluster.daemon.client() as client:
        wait_until(lambda: client.checkpoints("kill") == source.checkpoints("kill"))
