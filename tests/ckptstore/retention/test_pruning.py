from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ckptstore.commits.audit import AuditEntry, read_log
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.commits.commit import commit_attempt
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.deletion import collect
from ckptstore.retention.pins import pin
from ckptstore.retention.policy import evaluate
from ckptstore.retention.pruning import PrunePlan, apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import RUN, SMALL, intact, keys, prune, steps, write, write_checkpoint, write_rank
from tests.support.stores import DictStore, FakeClock

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


def test_prune_keeps_the_newest_steps_and_deletes_the_bytes_of_the_rest(store: Store) -> None:
    run, written = Run(store, RUN), write(store, *range(10))
    plan = plan_prune(run, Policy(3))
    assert [(v.checkpoint.step, v.reasons) for v in plan.keep] == [(9, ("last-1",)), (8, ("last-2",)), (7, ("last-3",))]
    assert [c.step for c in plan.remove] == [6, 5, 4, 3, 2, 1, 0]
    assert steps(store) == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0], "planning deletes nothing"
    assert (prune(store, 3), steps(store)) == ([], [9, 8, 7])
    for checkpoint in written:
        assert bool(keys(store, run.keys.attempt(checkpoint.attempt))) == (checkpoint.step >= 7)
    assert all(intact(store, checkpoint) for checkpoint in list_checkpoints(run))
    assert (prune(store, 3), steps(store)) == ([], [9, 8, 7])


@pytest.mark.parametrize("off_s", [-7200, -1000, 0, 1000, 7200])
def test_ages_count_by_the_stores_clock_not_the_committers(off_s: float) -> None:
    clock = FakeClock()
    store = DictStore(clock)
    for step in range(4):
        write_checkpoint(store, RUN, step, SMALL, clock=lambda: clock() + off_s)
        clock.now += 1800
    plan = plan_prune(Run(store, RUN, clock), Policy(keep_within_s=3600, keep_hourly=2))
    assert [(v.checkpoint.step, v.reasons) for v in plan.keep] == [
        (3, ("hourly-1", "within")), (2, ("within",)), (1, ("hourly-2",)),
    ]  # fmt: skip


def zombie_and_successor(store: Store, clock: FakeClock) -> Run:
    """An old job commits 400 in time, and 500 after its successor has begun and committed 310 and 320."""
    run = Run(store, RUN, clock)
    save = partial(write_checkpoint, store, RUN, arrays=SMALL, clock=clock)
    one = begin_generation(run, Session(new_ulid(clock()), None)).number
    *_, at_300, _ = [save(step, generation=one) for step in (100, 200, 300, 400)]
    attempt = Attempt(500, new_ulid(clock()), generation=one)
    late = write_rank(store, RUN, attempt, SMALL, clock=clock)
    clock.now += HOUR_S
    two = begin_generation(run, Session(new_ulid(clock()), at_300.attempt)).number
    document, begun_at = store.get(run.keys.generation(two)), clock.now
    clock.now += HOUR_S
    store.delete_many([run.keys.generation(two)])  # not there yet when the old job looked
    commit_attempt(run, [late])
    clock.now = begun_at
    store.put(run.keys.generation(two), document)
    for step in (310, 320):
        save(step, generation=two)
    clock.now = begun_at + HOUR_S
    return run


def test_abandoned_checkpoints_have_a_rule_of_their_own() -> None:
    """And the newest steps are counted within the live lineage: an old job that came back costs none of it."""
    clock = FakeClock()
    run, begun_at = zombie_and_successor(DictStore(clock), clock), clock.now - HOUR_S
    listed = {c.step: c.abandoned_at for c in list_checkpoints(run) if c.state is State.ABANDONED}
    assert listed == {400: begun_at, 500: begun_at + HOUR_S}, "500 was committed after its successor began"

    def kept(**rules: float) -> dict[int, tuple[str, ...]]:
        plan = plan_prune(run, Policy(keep_last=2, **rules))  # type: ignore[arg-type]
        assert {d.why_removed for d in plan.decisions if not d.reasons and d.checkpoint.step >= 400} <= {"abandoned"}
        return {d.checkpoint.step: d.reasons for d in plan.keep}

    live, recently = {320: ("last-1",), 310: ("last-2",)}, ("abandoned-within",)
    assert (kept(), kept(keep_abandoned_s=0)) == (live | {400: recently, 500: recently}, live)
    clock.now = begun_at + 7 * DAY_S + 1
    assert kept() == live | {500: recently}
    assert kept(keep_abandoned_s=8 * DAY_S) == live | {400: recently, 500: recently}
    pin(run, next(c.attempt for c in list_checkpoints(run) if c.step == 500), "look")
    clock.now += HOUR_S
    assert kept() == live | {500: ("pin:look",)}
    ids = {c.step: c.id for c in list_checkpoints(run)}
    assert apply_prune(run, plan_prune(run, Policy(keep_last=2))) == []
    assert ([c.step for c in list_checkpoints(run)], latest(run).step) == ([320, 310, 500], 320)
    log = {entry.reason: entry.ids for entry in (AuditEntry.of(RUN, record) for record in read_log(run))}
    assert (log["prune"], log["prune: abandoned"]) == ([ids[300], ids[200], ids[100]], [ids[400]])


def test_a_damaged_generation_costs_no_abandoned_checkpoint() -> None:
    clock = FakeClock()
    run = zombie_and_successor(DictStore(clock), clock)
    run.store.put(run.keys.generation(2), b"noise")
    clock.now += 30 * DAY_S
    plan = plan_prune(run, Policy(keep_last=100))
    assert (plan.remove, {d.checkpoint.state for d in plan.keep}) == ([], {State.COMMITTED})


def test_prune_of_a_run_that_does_not_exist(store: Store) -> None:
    run = Run(store, RUN)
    assert (plan_prune(run, Policy(1)).decisions, collect(run).freed_bytes, keys(store)) == ((), 0, [])


def test_what_is_thinned_counts_towards_the_largest_fraction() -> None:
    """Of 20 checkpoints: the two oldest are deleted, and all but the newest lose optimizer state."""
    listed = [
        Checkpoint(RUN, Attempt(step, new_ulid(0.0)), State.COMMITTED, stored_bytes=100, optimizer_bytes=60)
        for step in range(19, -1, -1)
    ]
    plan = PrunePlan(tuple(evaluate(Policy(keep_full=1, keep_weights=18), listed, {}, 0.0)), (RUN,))
    assert ([c.step for c in plan.remove], len(plan.thin)) == ([1, 0], 17)
    assert replace(plan, max_delete_fraction=0.95).blocked == ""
    assert "would delete or thin 19 of 20 checkpoints of run" in plan.blocked
    within = replace(plan, max_delete_fraction=0.25).within_fractions()
    assert ([c.step for c in within.remove], [c.step for c in within.thin]) == ([1, 0], [4, 3, 2])
    assert within.blocked == ""
    assert [d.reasons for d in within.decisions[1:18]] == [d.reasons for d in plan.decisions[1:18]]
    fewer = replace(plan, max_delete_fraction=0.05).within_fractions()
    assert ([c.step for c in fewer.remove], fewer.thin) == ([0], [])
    assert fewer.decisions[-2].reasons == ("for-now",)


def test_an_old_plan_may_be_applied_twice_and_late(store: Store) -> None:
    run, seen = Run(store, RUN), list[int]()
    first, second, _ = write(store, 1, 2, 3)
    plan = plan_prune(run, Policy(1))
    write(store, 4)
    for _ in range(2):
        assert (apply_prune(run, plan, progress=seen.append), steps(store)) == ([], [4, 3])
        assert seen[:2] == [second.stored_bytes, first.stored_bytes], "each is reported"
