"""Lives in which checkpoints are thinned, referenced, restored, pruned and taken back more often than anything else.

The model and its invariants are those of tests/support/life_cycle.py. CKPTD_LIFE_CYCLES says how many lives are tried.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from ckptstore.format.records import Policy
from tests.support.life_cycle import HOUR_S, LifeCycle
from tests.support.stores import Faults

LIVES = int(os.environ.get("CKPTD_LIFE_CYCLES", "12"))
STEPS = 45


def fault(rng: Random) -> Faults | None:
    return Faults(rng.randrange(40), rng.choice(["before", "after"])) if rng.random() < 0.25 else None


def act(life: LifeCycle, rng: Random, number: int) -> None:
    """One random step. number: of the step, which is the step that is saved."""
    pick, kind = rng.randrange(1000), rng.random()
    if kind < 0.15:
        life.save(step=number, loss=rng.random())
    elif kind < 0.4:
        moments, deltas = rng.random() < 0.7, rng.random() < 0.5
        life.reference(number=pick, step=number, loss=rng.random(), moments=moments, deltas=deltas, fault=fault(rng))
    elif kind < 0.65:
        last, every = rng.choice([0, 0, 4]), rng.choice([0, 5])
        policy = Policy(
            keep_last=last,
            keep_every=every,
            keep_full=rng.randrange(1, 3),
            keep_weights="all" if rng.random() < 0.5 else 4,
        )
        life.prune(policy=policy, grace_s=rng.choice([0.0, HOUR_S, 24 * HOUR_S]), fault=fault(rng))
    elif kind < 0.75:
        life.lease(number=pick, hours=rng.randrange(1, 40), weights=rng.random() < 0.4, fault=fault(rng))
    elif kind < 0.8:
        life.pin(number=pick, name="paper", weights=rng.random() < 0.4, fault=fault(rng))
    elif kind < 0.84:
        life.unpin(number=pick, name="paper")
    elif kind < 0.9:
        life.undelete(number=pick, fault=fault(rng))
    elif kind < 0.94:
        life.collect(fault=fault(rng))
    elif kind < 0.96:
        life.delete(number=pick, grace_s=HOUR_S, fault=fault(rng))
    else:
        life.wait(hours=rng.choice([0.1, 2, 25, 24 * 8]))


@pytest.mark.parametrize("seed", range(LIVES))
def test_nothing_that_is_needed_is_ever_lost(seed: int) -> None:
    life, rng = LifeCycle(), Random(seed)
    for number in range(STEPS):
        act(life, rng, number)
        life.what_is_listed_is_whole()
        life.the_latest_is_the_newest_of_the_lineage()
        life.what_is_held_is_there()
        life.what_is_referenced_is_there()
        life.hidden_is_not_lost()
    life.teardown()
