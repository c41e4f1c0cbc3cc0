"""A run of small checkpoints, and a look at what became of it: for tests of deletion and leases."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.errors import NoCheckpoint, SweepBegun
from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import SWEEP_GRACE_S, collect, undelete
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import Faults, FaultyStore, MovableClock

RUN = "gpt"
SMALL = {"model/a": np.arange(3000, dtype=np.float32)}


def write(store: Store, *steps: int) -> list[Checkpoint]:
    """Committed checkpoints of the given steps."""
    return [write_checkpoint(store, RUN, step, SMALL) for step in steps]


def steps(store: Store, run: str = RUN) -> list[int]:
    """Steps that are listed."""
    return [checkpoint.step for checkpoint in list_checkpoints(Run(store, run))]


def prune(store: Store, keep: int) -> list[Checkpoint]:
    """Prune to the newest; returns those spared."""
    run = Run(store, RUN)
    return apply_prune(run, plan_prune(run, Policy(keep)))


def prune_undelete_and_collect(store: Store, taken_back: Attempt) -> None:
    """All that deletes, a grace after the first prunes: keep the newest, take one back, sweep the rest."""
    later = MovableClock(SWEEP_GRACE_S + 60)
    run = Run(store, RUN, later)
    apply_prune(run, plan_prune(run, Policy(1)), grace_s=3600)
    try:
        undelete(Run(store, RUN, by="me"), taken_back)
    except (SweepBegun, NoCheckpoint):
        pass
    collect(run)


def keys(store: Store, prefix: str = "") -> list[str]:
    """Keys in the store."""
    return [info.key for info in store.list(prefix)]


def intact(store: Store, checkpoint: Checkpoint) -> bool:
    """Whether every byte of it is there."""
    return verify(StoreSource(store), checkpoint, threads=1).ok


def clear(store: Store) -> None:
    store.delete_many(keys(store))


def count_calls(store: Store, action: Callable[[Store], object]) -> int:
    counting = Faults()
    action(FaultyStore(store, counting))
    return len(counting.calls)
