"""Random prunes, undeletes, pins and collections against random saves and restores, all at once.

CKPTD_SOAK_SECONDS says for how long; a few by default.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, latest, list_checkpoints, newest_first
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.errors import CheckpointHeld, CkptError, NoCheckpoint, SweepBegun
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect, list_hidden, undelete
from ckptstore.retention.pins import pin, pinned, unpin
from ckptstore.retention.pruning import Prune, apply_prune, apply_prunes, plan_prune, plan_prunes
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, write_checkpoint, write_rank
from tests.support.stores import MovableClock
from tests.support.waiting import wait_until

SECONDS = float(os.environ.get("CKPTD_SOAK_SECONDS", "4"))
RUNS = ("gpt", "vit")
ORPHAN_GRACE_S = 3.0


class Soak:
    """The part of each process, and what went wrong."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stop_at = time.monotonic() + SECONDS
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.saved = dict.fromkeys(RUNS, -1)

    def loop(self, part: Callable[[random.Random], None], seed: int, pause_s: float) -> None:
        dice = random.Random(seed)
        while time.monotonic() < self.stop_at and not self.problems:
            try:
                part(dice)
                self.counts[part.__name__] += 1
            except (NoCheckpoint, CheckpointHeld, SweepBegun):
                self.counts[f"{part.__name__}, too late"] += 1
            except (CkptError, AssertionError) as error:
                self.problems.append(f"{part.__name__}: {error!r}")
            time.sleep(dice.random() * pause_s)

    def save(self, dice: random.Random) -> None:
        run = dice.choice(RUNS)
        step = self.saved[run] + 1
        if dice.random() < 0.2:  # a saver that dies
            write_rank(self.store, run, Attempt(step, new_ulid(system_clock())), SMALL, 0, 2)
        write_checkpoint(self.store, run, step, SMALL, {"loss": dice.random()})
        self.saved[run] = step

    def restore(self, dice: random.Random) -> None:
        run = dice.choice(RUNS)
        acknowledged = self.saved[run]
        for checkpoint in newest_first(Run(self.store, run)):
            try:
                lease = take_lease(Run(self.store, run), checkpoint.attempt, "restore", 60)
            except NoCheckpoint:
                continue
            time.sleep(dice.random() * 0.05)
            assert self.whole(checkpoint), f"{checkpoint.id} was deleted under a restore"
            release_lease(Run(self.store, run), lease)
            break
        if acknowledged >= 0:
            assert latest(Run(self.store, run)).step >= acknowledged, "the newest was lost"

    def prune(self, dice: random.Random) -> None:
        policy = Policy(
            keep_last=dice.randint(1, 4), keep_every=dice.choice([0, 10]),
            keep_best=("loss:min:2",) if dice.random() < 0.3 else (), max_bytes=dice.choice([0, 0, 60_000]),
        )  # fmt: skip
        wanted = Prune(policy, dice.choice([None, *RUNS]), dice.choice([0.0, 0.0, 0.2, 1.0]))
        plan = plan_prunes(self.store, wanted, system_clock)
        apply_prunes(self.store, plan, system_clock, "pruner", True, lambda _: None, lambda _: None)

    def undelete(self, dice: random.Random) -> None:
        run = dice.choice(RUNS)
        hidden = list_hidden(Run(self.store, run))
        if hidden:
            attempt = dice.choice(hidden).attempt
            undelete(Run(self.store, run, by="operator"), attempt)
            self.counts["came back"] += 1

    def hold(self, dice: random.Random) -> None:
        run = dice.choice(RUNS)
        found = list_checkpoints(Run(self.store, run))
        if not found:
            return
        checkpoint = dice.choice(found)
        pin(Run(self.store, run, by="operator"), checkpoint.attempt, "soak")
        time.sleep(dice.random() * 0.5)
        # A prune that began before the pin may hide it for a moment, until its second look at what is held.
        wait_until(lambda: checkpoint in list_checkpoints(Run(self.store, run)), "a pinned one was hidden", 30)
        assert self.whole(checkpoint), "a pinned one was deleted"
        unpin(Run(self.store, run, by="operator"), checkpoint.attempt, "soak")

    def clean(self, dice: random.Random) -> None:
        collect(Run(self.store, dice.choice(RUNS)), ORPHAN_GRACE_S)

    def whole(self, checkpoint: Checkpoint) -> bool:
        return verify(StoreSource(self.store), checkpoint, threads=1).ok


@pytest.mark.timeout(SECONDS + 300)
def test_nothing_is_lost_broken_or_leaked(tmp_path: Path) -> None:
    soak = Soak(open_store(str(tmp_path / "store")))
    parts = [
        (soak.save, 0.02), (soak.restore, 0.01), (soak.restore, 0.01), (soak.prune, 0.2), (soak.prune, 0.2),
        (soak.undelete, 0.1), (soak.hold, 0.05), (soak.clean, 0.3), (soak.clean, 0.3),
    ]  # fmt: skip
    threads = [threading.Thread(target=soak.loop, args=(part, i, pause)) for i, (part, pause) in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(dict(soak.counts))
    assert soak.problems == []
    assert min(soak.counts[name] for name in ("save", "restore", "prune", "hold", "clean")) > 0
    later = MovableClock(8 * 24 * 3600.0)
    for run in RUNS:
        assert pinned(Run(soak.store, run)) == {}
        named = Run(soak.store, run, later)
        for _ in range(3):
            collect(named)
            apply_prune(named, plan_prune(named, Policy(1)))
            later.advance(8 * 24 * 3600.0)
        listed = list_checkpoints(named)
        assert [c.step for c in listed] == [soak.saved[run]]
        assert soak.whole(listed[0])
        left = {str(c.attempt) for c in listed}
        assert set(soak.store.list_folders(named.keys.attempts)) == left, "bytes were leaked"
        for prefix in (named.keys.tombstones, named.keys.leases):
            assert not list(soak.store.list(prefix))
