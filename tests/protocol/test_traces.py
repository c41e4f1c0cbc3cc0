"""What real code does to a store is one of the ways through its table, undisturbed and with a failure at each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from ckptstore.commits.catalog import latest
from ckptstore.commits.commit import abort_attempt, commit_attempt, roll_forward
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.errors import AttemptAborted, CkptError
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.deletion import SWEEP_GRACE_S, TOMBSTONE_KEPT_S, collect, hide, sweep, undelete_checkpoint
from ckptstore.retention.pins import pin
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.protocol.actors import (
    cleaner,
    collector,
    committer,
    deleter,
    forgetter,
    forgetter_of_aborted,
    forgetter_of_fate,
    pinner,
    rank,
    reader,
    resumer,
    sweeper,
    thinner,
    thinning_sweeper,
    undeleter,
)
from tests.protocol.recording import Event, Names, RecordingStore, accepts
from tests.protocol.rules import Rules
from tests.protocol.scenarios import leftovers
from tests.protocol.table import Key, Program
from tests.support.checkpoints import RUN, SMALL, clear, write, write_checkpoint, write_rank
from tests.support.stores import Faults, FaultyStore, MovableClock

pytestmark = pytest.mark.parametrize("store", ["memory"], indirect=True)

RULES = Rules()
ONE = ("0",)
LATER = MovableClock(SWEEP_GRACE_S + 60)
WEEKS = MovableClock(2 * TOMBSTONE_KEPT_S)
STATE = SMALL
A = Attempt(1, new_ulid(0))

Act = Callable[[Store], object]


def attempt(store: Store, ranks: int = 1) -> None:
    for r in range(ranks):
        write_rank(store, RUN, A, STATE if r == 0 else {}, r, ranks)


def checkpoint(store: Store) -> Attempt:
    return write(store, 1)[0].attempt


def hidden(store: Store) -> Attempt:
    a = checkpoint(store)
    assert hide(Run(store, RUN), [a], "test") == {}
    return a


def first(store: Store) -> Attempt:
    (name,) = store.list_folders(f"{RUN}/attempts/")
    return Attempt.parse(name)


def full(store: Store) -> Attempt:
    """With optimizer state."""
    return write_checkpoint(store, RUN, 1, STATE | {"optim/a": np.ones(9)}).attempt


def thinning(store: Store) -> Attempt:
    a = full(store)
    assert hide(Run(store, RUN), [a], "test", thins=True) == {}
    return a


def swept(store: Store) -> None:
    hidden(store)
    sweep(Run(store, RUN, LATER))


def aborted(store: Store) -> None:
    attempt(store, ranks=1)
    abort_attempt(Run(store, RUN), A, 0)
    collect(Run(store, RUN, LATER))


def forget(store: Store) -> None:
    collect(Run(store, RUN, WEEKS))


def zombie(store: Store) -> None:
    """A committer has woken up: it was aborted and forgotten."""
    receipt = write_rank(store, RUN, A, STATE)
    abort_attempt(Run(store, RUN), A, 0)
    collect(Run(store, RUN, LATER))
    forget(store)
    try:
        commit_attempt(Run(store, RUN), [receipt])
    except AttemptAborted:
        return
    raise AssertionError("it did not notice")


def referencing(store: Store) -> object:
    base, later = first(store), Attempt(2, new_ulid(1))
    return commit_attempt(Run(store, RUN), [write_rank(store, RUN, later, STATE | {"model/b": np.ones(9)}, base=base)])


def referencing_all(store: Store) -> object:
    base, later = first(store), Attempt(2, new_ulid(1))
    state = STATE | {"model/b": np.ones(9), "optim/a": np.ones(9)}
    return commit_attempt(Run(store, RUN), [write_rank(store, RUN, later, state, base=base)])


CASES: dict[str, tuple[Act, Act, list[Program]]] = {
    "one rank commits": (
        lambda s: None,
        lambda s: write_checkpoint(s, RUN, 1, STATE),
        [rank("a", "0"), committer("a", RULES, ONE, ready=True, forgets=True)],
    ),
    "a rank saves": (lambda s: None, lambda s: write_rank(s, RUN, A, STATE, 0, 2), [rank("a", "0")]),
    "a rank fails": (lambda s: None, lambda s: abort_attempt(Run(s, RUN), A, 1, "disk"), [rank("a", "1", fails=True)]),
    "two ranks are rolled forward": (
        partial(attempt, ranks=2), lambda s: roll_forward(Run(s, RUN), A), [committer("a", RULES, forgets=True)]
    ),
    "a second committer": (
        checkpoint, lambda s: roll_forward(Run(s, RUN), first(s)),
        [committer("a", RULES, ONE, forgets=True)],
    ),
    "an orphan is collected": (
        lambda s: write_rank(s, RUN, A, STATE, 0, 2),
        lambda s: collect(Run(s, RUN, LATER)),
        [collector("a", RULES)],
    ),
    "a deletion": (checkpoint, lambda s: hide(Run(s, RUN), [first(s)], "test"), [deleter("a", "t", RULES)]),
    "a deletion of what is held": (
        lambda s: pin(Run(s, RUN), checkpoint(s), "paper"),
        lambda s: hide(Run(s, RUN), [first(s)], "test"),
        [deleter("a", "t", RULES)],
    ),
    "a sweep": (hidden, lambda s: sweep(Run(s, RUN, LATER)), [sweeper("a", "t", RULES, ONE)]),
    "an undelete": (
        hidden, lambda s: undelete_checkpoint(Run(s, RUN), Reference(RUN, 1)), [undeleter("a", ["t"], RULES)]
    ),
    "a thinning": (full, lambda s: hide(Run(s, RUN), [first(s)], "test", thins=True), [thinner("a", "t", RULES)]),
    "a thinning of what is held": (
        lambda s: pin(Run(s, RUN), full(s), "paper"),
        lambda s: hide(Run(s, RUN), [first(s)], "test", thins=True),
        [thinner("a", "t", RULES)],
    ),
    "a sweep of a thinning": (thinning, lambda s: sweep(Run(s, RUN, LATER)), [thinning_sweeper("a", "t", RULES)]),
    "an undelete of a thinning": (
        thinning, lambda s: undelete_checkpoint(Run(s, RUN), Reference(RUN, 1)),
        [undeleter("a", ["t"], RULES, "thinnings")],
    ),
    "a resume": (
        full,
        lambda s: release_lease(Run(s, RUN), take_lease(Run(s, RUN), latest(Run(s, RUN)).attempt, "me", 60)),
        [resumer("a", "l", RULES)],
    ),
    "a save that references optimizer state": (
        full, referencing_all,
        [rank("b", "0", optimizer=True), committer("b", RULES, ONE, base="a", ready=True, forgets=True, optimizer=True)]
    ),
    "a reader": (
        checkpoint,
        lambda s: release_lease(Run(s, RUN), take_lease(Run(s, RUN), latest(Run(s, RUN)).attempt, "me", 60)),
        [reader("a", "l", RULES, forgets=True)],
    ),
    "a pin": (checkpoint, lambda s: pin(Run(s, RUN), first(s), "paper"), [pinner("a", RULES, forgets=True)]),
    "a save that references": (
        checkpoint, referencing, [rank("b", "0"), committer("b", RULES, ONE, base="a", ready=True, forgets=True)]
    ),
    "a deletion is forgotten": (swept, forget, [forgetter("a", ["t"], "a", RULES)]),
    "an abort is forgotten": (aborted, forget, [forgetter_of_aborted("a", "a", RULES)]),
    "an undelete is forgotten": (
        lambda s: (hidden(s), undelete_checkpoint(Run(s, RUN), Reference(RUN, 1))),
        forget, [forgetter_of_fate("a", "t")],
    ),
    "what a committer has left that woke up": (zombie, forget, [cleaner("a", leftovers("a"))]),
}  # fmt: skip
"""What is there before, what is recorded, and the tables of the process."""


def record(store: Store, before: Act, act: Act, faults: Faults | None = None) -> list[Event]:
    clear(store)
    before(store)
    names = Names()
    for name in store.list_folders(f"{RUN}/attempts/"):
        names.attempt(name)
    recording = RecordingStore(FaultyStore(store, faults or Faults()), names)
    try:
        act(recording)
    except CkptError:
        assert faults is not None
    return recording.trace


@pytest.mark.parametrize("case", CASES)
def test_what_is_done_is_a_way_through_the_table(store: Store, case: str) -> None:
    before, act, programs = CASES[case]
    trace = record(store, before, act)
    assert trace
    for one in programs:
        assert (refused := accepts(one, trace)) is None, refused


@pytest.mark.parametrize("mode", ["before", "after"])
@pytest.mark.parametrize("case", CASES)
def test_so_is_what_is_done_until_a_call_fails(store: Store, case: str, mode: str) -> None:
    before, act, programs = CASES[case]
    calls = Faults()
    record(store, before, act, calls)
    for k in range(len(calls.calls)):
        trace = record(store, before, act, Faults(k, mode))  # type: ignore[arg-type]
        for one in programs:
            assert (refused := accepts(one, trace, crashed=True)) is None, f"call {k}: {refused}"


def _without(event: Event, key: Key) -> Event:
    return replace(event, found={other: value for other, value in event.found.items() if other != key})


@pytest.mark.parametrize("case", CASES)
def test_a_trace_without_one_of_its_writes_is_refused(store: Store, case: str) -> None:
    before, act, programs = CASES[case]
    trace = record(store, before, act)
    for write_ in [event for event in trace if event.verb in ("put", "create")]:
        left = [_without(event, write_.key) for event in trace if event is not write_]
        assert any(accepts(one, left) for one in programs), f"{write_} is not missed"
