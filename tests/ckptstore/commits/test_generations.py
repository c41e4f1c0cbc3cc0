"""Generations: one for each session, created by any rank; and which checkpoints are of the live lineage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import (
    Checkpoint,
    State,
    candidates,
    find,
    latest,
    list_checkpoints,
    newest_first,
    with_states,
)
from ckptstore.commits.commit import commit_attempt, decide, read_outcome
from ckptstore.commits.generations import (
    Begun,
    Continuations,
    Lineage,
    Session,
    begin_generation,
    list_generations,
    newest_generation,
    read_generation,
    read_generations,
)
from ckptstore.errors import NoCheckpoint, StoreUnavailable, Superseded
from ckptstore.format.documents import FORMAT, Generation
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import seal
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.deletion import advance, delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import at_every_call, write_checkpoint, write_rank
from tests.support.stores import Faults, FaultyStore, MovableClock, race
from tests.support.waiting import present

SMALL = {"model/a": np.arange(10)}


def session(parent: Attempt | None = None) -> Session:
    return Session(new_ulid(system_clock()), parent)


def begin(run: Run, parent: Checkpoint | None = None) -> int:
    return begin_generation(run, session(parent.attempt if parent is not None else None)).number


def write(run: Run, generation: int, step: int) -> Checkpoint:
    return write_checkpoint(run.store, run.name, step, SMALL, generation=generation)


# The beginning of a generation.


def test_numbers_are_used_in_sequence_and_a_session_has_one(store: Store) -> None:
    run, parent = Run(store, "gpt"), Attempt(7, new_ulid(0))
    first, second = session(), session(parent)
    assert begin_generation(run, first) == Begun(1, created=True)
    assert begin_generation(run, second) == Begun(2, created=True)
    assert begin_generation(run, first) == Begun(1, created=False)
    assert begin_generation(run, second) == Begun(2, created=False)
    found = present(read_generation(run, 2))
    assert (found.session, found.parent, found.by) == (second.id, str(parent), run.by)
    assert newest_generation(run) == 2


@pytest.mark.parametrize("store", ["local", "memory", "s3"], indirect=True)
def test_ranks_that_race_begin_one_generation_and_trainers_one_each(store: Store) -> None:
    run, sessions = Run(store, "gpt"), [session() for _ in range(3)]
    raced = race(*(partial(begin_generation, run, one) for one in sessions for _ in range(4)))
    found = [begun for begun in raced if isinstance(begun, Begun)]
    assert found == raced
    numbers = [{begun.number for begun in found[i : i + 4]} for i in (0, 4, 8)]
    assert (sorted(map(len, numbers)), set.union(*numbers)) == ([1, 1, 1], {1, 2, 3})
    assert sum(begun.created for begun in found) == 3


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_beginning_that_fails_at_any_call_is_repeated_with_the_same_number(store: Store, mode: str) -> None:
    for number in range(20):
        run, one = Run(store, f"gpt-{number}"), session()
        begin(run)
        faults = Faults(number, mode)  # type: ignore[arg-type]
        try:
            begin_generation(Run(FaultyStore(store, faults), run.name), one)
        except StoreUnavailable:
            assert not any(call.startswith("put_if_absent") for call in faults.calls), "a create is repeated"
        assert (begin_generation(run, one).number, newest_generation(run)) == (2, 2)
        if len(faults.calls) <= number:
            return
    pytest.fail("it makes more calls than expected")


def test_another_rank_or_trainer_may_act_at_every_call(store: Store) -> None:
    run = Run(store, "gpt")

    def work(on: Store, scene: tuple[Session, Session]) -> int:
        return begin_generation(Run(on, "gpt"), scene[0]).number

    def others(scene: tuple[Session, Session]) -> list[int]:
        return [begin_generation(run, one).number for one in reversed(scene)]

    for _, found, (numbers,) in at_every_call(store, lambda _: (session(), session()), work, others):
        assert (found, sorted(numbers), newest_generation(run)) == (numbers[1], [1, 2], 2)


def test_a_number_of_which_there_are_checkpoints_is_not_used_again(store: Store) -> None:
    run = Run(store, "gpt")
    begin(run)
    write(run, 1, 5)
    store.delete_many([run.keys.generation(1)])
    assert begin(run) == 2
    store.put(run.keys.generation(2), b"noise")
    assert read_generation(run, 2) is None
    assert begin(run) == 3


# Commits.


def receipt_of(store: Store, attempt: Attempt) -> StoredReceipt:
    return write_rank(store, "gpt", attempt, SMALL)


def test_an_attempt_of_an_older_generation_is_aborted_and_every_committer_says_why(store: Store) -> None:
    run = Run(store, "gpt")
    attempt = Attempt(400, new_ulid(system_clock()), generation=begin(run))
    receipt = receipt_of(store, attempt)
    begin(run)
    assert not advance(run, attempt)
    for _ in range(2):
        with pytest.raises(Superseded, match="generation 2") as caught:
            commit_attempt(run, [receipt])
        assert caught.value.code == "superseded"
    outcome = present(read_outcome(run, attempt))
    assert (outcome.committed, outcome.by) == (None, "superseded by generation 2")
    with pytest.raises(NoCheckpoint):
        latest(run)


def test_a_commit_that_had_happened_is_not_taken_back(store: Store) -> None:
    run = Run(store, "gpt")
    attempt = Attempt(400, new_ulid(system_clock()), generation=begin(run))
    receipt = receipt_of(store, attempt)
    before = commit_attempt(run, [receipt])
    begin(run)
    assert (commit_attempt(run, [receipt]), latest(run).attempt) == (before, attempt)


def test_a_generation_may_begin_at_every_call_of_a_commit(store: Store) -> None:
    run = Run(store, "gpt")

    def set_up(store: Store) -> StoredReceipt:
        return receipt_of(store, Attempt(400, new_ulid(system_clock()), generation=begin(run)))

    def commit(on: Store, receipt: StoredReceipt) -> None:
        with contextlib.suppress(Superseded):
            commit_attempt(Run(on, "gpt"), [receipt])

    def successor(_: StoredReceipt) -> Checkpoint:
        return write(run, begin(run), 310)

    for _, _, (made,) in at_every_call(store, set_up, commit, successor):
        assert latest(run) == made
        assert {c.state for c in list_checkpoints(run) if c.attempt.generation == 1} <= {State.ABANDONED}


# The live lineage.


def docs(parents: dict[int, Attempt | None]) -> Callable[[int], Generation | None]:
    """The documents of generations with these parents; a missing one is damaged."""
    found = {
        number: Generation(
            format=FORMAT, kind="generation", run="gpt", number=number, session=new_ulid(0),
            parent=str(parent) if parent is not None else None, by="", at=0.0,
        )
        for number, parent in parents.items()
    }  # fmt: skip
    return found.get


ULIDS = [new_ulid(number) for number in range(3)]
attempts = st.builds(
    lambda generation, step, ulid: Attempt(step, ulid, generation=generation),
    st.integers(0, 4), st.integers(0, 4), st.sampled_from(ULIDS),
)  # fmt: skip


def attempts_before(number: int) -> st.SearchStrategy[Attempt]:
    return attempts.filter(lambda attempt: attempt.generation < number)


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[Checkpoint], dict[int, Attempt | None]]:
    listed = draw(st.lists(attempts, unique=True, max_size=12))
    checkpoints = [
        Checkpoint("gpt", attempt, draw(st.sampled_from([State.COMMITTED, State.COMMITTED, State.CORRUPT])))
        for attempt in sorted(listed, reverse=True)
    ]
    parents: dict[int, Attempt | None] = {}
    for number in range(1, 5):
        if draw(st.integers(0, 4)):
            parents[number] = draw(st.none() | attempts_before(number))
    return checkpoints, parents


def live_by_definition(checkpoints: list[Checkpoint], parents: dict[int, Attempt | None]) -> set[Attempt]:
    """As format.md defines it, one attempt at a time."""

    def in_lineage(attempt: Attempt, head: int) -> bool:
        if attempt.generation == head:
            return True
        if head not in parents:
            return attempt.generation < head
        parent = parents[head]
        if parent is None:
            return False
        if attempt.generation == parent.generation:
            return attempt == parent or attempt.step < parent.step
        return in_lineage(attempt, parent.generation)

    certain = max({c.attempt.generation for c in checkpoints if c.state is State.COMMITTED}, default=-1)
    heads = {c.attempt.generation for c in checkpoints if c.attempt.generation >= certain}
    # Generation 0 has no document, and nothing is before it.
    return {c.attempt for c in checkpoints if any(in_lineage(c.attempt, head) for head in heads)}


@given(stories())
def test_what_is_live(story: tuple[list[Checkpoint], dict[int, Attempt | None]]) -> None:
    checkpoints, parents = story
    lineage = Lineage(docs(parents))
    listed = with_states(checkpoints, lineage)
    live = live_by_definition(checkpoints, parents)
    assert {c.attempt for c in checkpoints if lineage.includes(c.attempt)} == live
    assert {c.attempt for c in listed if c.state is State.ABANDONED} == {
        c.attempt for c in listed if c.state not in (State.CORRUPT, State.SUPERSEDED)
    } - live
    assert sorted(c.attempt for c in listed) == sorted(c.attempt for c in checkpoints)


@given(stories())
def test_what_continues_from_an_attempt(story: tuple[list[Checkpoint], dict[int, Attempt | None]]) -> None:
    checkpoints, parents = story
    lineages = {number: Lineage(docs(parents)) for number in range(1, 5)}
    for number, lineage in lineages.items():
        lineage.add(number, readable=True)
    for c in checkpoints:
        heads = [n for n, lineage in lineages.items() if n >= c.attempt.generation and lineage.includes(c.attempt)]
        assert Continuations(lineages, docs(parents)).newest(c.attempt) == max(heads, default=0)


@given(stories())
def test_a_restore_tries_exactly_what_is_live(story: tuple[list[Checkpoint], dict[int, Attempt | None]]) -> None:
    planned, parents = story
    store = open_store(f"memory://{new_ulid(system_clock())}")
    run = Run(store, "gpt")
    for c in planned:
        commit_attempt(run, [receipt_of(store, c.attempt)])
        if c.state is State.CORRUPT:
            store.put(run.keys.outcome(c.attempt), b"noise")
    for number in range(1, 5):
        found = docs(parents)(number)
        store.put(run.keys.generation(number), seal(found) if found is not None else b"noise")
    listed, live = list_checkpoints(run), live_by_definition(planned, parents)
    usable = (State.COMMITTED, State.CORRUPT)
    tried = [c.attempt for c in listed if c.attempt in live and c.state in usable]
    assert [c.attempt for c in candidates(run)] == tried
    assert [c.attempt for c in newest_first(run)] == [c.attempt for c in listed if c.state is State.COMMITTED]


def test_a_zombie_is_never_latest_and_rewinding_in_place_works(store: Store) -> None:
    run = Run(store, "gpt")
    one = begin(run)
    for step in (100, 200, 300):
        write(run, one, step)
    old = [Attempt(step, new_ulid(system_clock()), generation=one) for step in (400, 500)]
    receipts, two = [receipt_of(store, attempt) for attempt in old], begin(run, latest(run))
    # The old trainer had looked before the new one began.
    for attempt, receipt in zip(old, receipts, strict=True):
        committed_late(run, attempt, receipt)
    assert latest(run).step == 500, "the new one has no checkpoint yet"
    new = write(run, two, 310)
    assert latest(run) == new
    assert [(c.step, c.state) for c in list_checkpoints(run)] == [
        (310, State.COMMITTED), (500, State.ABANDONED), (400, State.ABANDONED),
        (300, State.COMMITTED), (200, State.COMMITTED), (100, State.COMMITTED),
    ]  # fmt: skip
    assert [c.step for c in newest_first(run)] == [310, 300, 200, 100]
    assert find(store, Reference("gpt", 500)).state is State.ABANDONED, "asked for by name, it is restored"
    again = write(run, begin(run, find(store, Reference("gpt", 200))), 300)
    assert find(store, Reference("gpt", 300)) == again
    assert [c.step for c in newest_first(run)] == [300, 200, 100]
    old_300 = next(c for c in list_checkpoints(run) if c.step == 300 and c.attempt.generation == one)
    assert find(store, Reference.parse(old_300.id)).state is State.ABANDONED
    delete_checkpoint(run, again.attempt, "test", force=True)
    assert latest(run) == new, "of the newest generation that still has a checkpoint"


def committed_late(run: Run, attempt: Attempt, receipt: StoredReceipt) -> None:
    """Commit as a trainer that looked for a newer generation before there was one."""
    key = run.keys.generation(attempt.generation + 1)
    data = run.store.get(key)
    run.store.delete_many([key])
    commit_attempt(run, [receipt])
    run.store.put(key, data)


def test_damage_abandons_nothing(store: Store) -> None:
    run = Run(store, "gpt")
    one = begin(run)
    first = [write(run, one, step) for step in (100, 200)]
    two = begin(run, first[0])
    write(run, two, 150)
    assert [c.state for c in list_checkpoints(run)] == [State.COMMITTED, State.ABANDONED, State.COMMITTED]
    store.put(run.keys.generation(two), b"noise")
    assert {c.state for c in list_checkpoints(run)} == {State.COMMITTED}
    assert [c.step for c in newest_first(run)] == [150, 200, 100]
    store.delete_many([run.keys.generation(two)])
    assert {c.state for c in list_checkpoints(run)} == {State.COMMITTED}


def test_latest_reads_no_generation(store: Store) -> None:
    run = Run(store, "gpt")
    for _ in range(5):
        previous = write(run, begin(run), 100)
    faults = Faults()
    assert latest(Run(FaultyStore(store, faults), "gpt")) == previous
    assert not [call for call in faults.calls if "generations" in call]
    assert list(read_generations(run)) == [1, 2, 3, 4, 5]


def test_aborted_attempts_are_no_head(store: Store) -> None:
    run = Run(store, "gpt")
    one = write(run, begin(run), 100)
    decide(run, Attempt(50, new_ulid(system_clock()), generation=begin(run)), None)
    assert (latest(run), list_checkpoints(run)) == (one, [one])


def test_a_session_of_long_ago_is_looked_for_only_as_far_as_needed(store: Store) -> None:
    clock = MovableClock(-10 * 24 * 3600.0)
    old = Run(store, "gpt", clock)
    for _ in range(6):
        begin_generation(old, Session(new_ulid(clock()), None))
    faults = Faults()
    assert begin(Run(FaultyStore(store, faults), "gpt")) == 7
    assert sum(call.startswith("get") for call in faults.calls) == 1


def test_a_branch_that_was_revived_is_left_when_it_is_left_again(store: Store) -> None:
    """Generation 3 continues the abandoned generation 1, and generation 4 continues generation 2 again."""
    run = Run(store, "gpt")
    saved: dict[int, Attempt] = {}
    for number, parent in ((1, None), (2, None), (3, 1), (4, 2)):
        session = Session(new_ulid(system_clock()), saved[parent] if parent else None)
        assert begin_generation(run, session).number == number
        saved[number] = write_checkpoint(store, "gpt", number, {}, generation=number).attempt
    lineage = Lineage(lambda number: read_generation(run, number))
    lineage.add(4, readable=True)
    assert [number for number, attempt in saved.items() if lineage.includes(attempt)] == [2, 4]
    assert lineage.left_by(saved[1], Continuations((), lineage.parent_of)) == 2, "as if it had not been revived"
    found = Continuations(list_generations(run), lineage.parent_of)
    assert lineage.left_by(saved[1], found) == lineage.left_by(saved[3], found) == 4
