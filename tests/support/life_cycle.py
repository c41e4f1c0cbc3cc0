"""The whole life of checkpoints against a model: saves, kills, references, prunes, undeletes, holds, sweeps, damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ckptstore import names
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints, newest_first
from ckptstore.commits.commit import commit_attempt
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.commits.hidden import listed_attempts
from ckptstore.commits.leases import release_lease, take_lease
from ckptstore.commits.references import Mark, marks, referenced_attempts
from ckptstore.errors import (
    CheckpointHeld,
    CkptError,
    NoCheckpoint,
    ReferenceLost,
    StoreUnavailable,
    StoreUnsafe,
    Superseded,
    SweepBegun,
)
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import (
    ORPHAN_GRACE_S,
    TOMBSTONE_KEPT_S,
    collect,
    delete_checkpoint,
    list_hidden,
    undelete,
)
from ckptstore.retention.pins import pin, pinned, unpin
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.retention.scrubbing import scrub
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.checks import MAX_SKEW_S, check_store
from tests.support.checkpoints import write_checkpoint, write_rank
from tests.support.stores import DictStore, FakeClock, Faults, FaultyStore

HOUR_S = 3600.0

faults = st.none() | st.builds(Faults, st.integers(0, 60), st.sampled_from(["before", "after"]))
graces = st.sampled_from([0.0, HOUR_S, 24 * HOUR_S])
policies = st.builds(
    Policy,
    keep_last=st.integers(1, 3),
    keep_every=st.sampled_from([0, 3]),
    keep_best=st.sampled_from([(), ("loss:min:1",)]),
    keep_full=st.sampled_from([0, 1, 2]),
    keep_weights=st.sampled_from([0, 2, "all"]),
    max_bytes=st.sampled_from([0, 1000]),
)
pick = st.integers(0, 1000)


@dataclass
class Life:
    """What the model knows of one committed attempt."""

    step: int
    frozen: Attempt
    """Who holds the chunk that is the same in all of them: itself, or an earlier one that it references."""
    moments: Attempt
    """The same of optimizer state."""
    bases: tuple[Attempt, ...] = ()
    """Those whose changing chunk is decoded before its own, which is a delta."""
    state: Literal["visible", "hidden", "gone"] = "visible"
    flipped: set[int] = field(default_factory=set)
    """Bytes of its shard that are not as they were written: 0 is of its own chunk, -1 the last one of all."""
    quarantined: bool = False
    pins: set[str] = field(default_factory=set)
    thin: str = "full"
    """full, thinning or thinned."""


def states() -> Iterator[dict[str, npt.NDArray[Any]]]:
    """What is saved in turn: one chunk that never changes, after one that always does; both of optimizer state, too."""
    noise = np.random.default_rng(0).integers(1 << 62, size=50)
    for number in count(1):
        yield {
            "model/a": np.arange(40, dtype=np.float32), "model/step": np.array([number, *noise], np.int64),
            "optim/a": np.arange(60, dtype=np.float32), "optim/step": np.array([number, 2], np.int64),
        }  # fmt: skip


def lineage(visible: Collection[Attempt], parents: Mapping[int, Attempt | None]) -> set[Attempt]:
    """What a trainer may resume from: what is visible of the newest generation, of its parent and before, and so on."""
    generation, end, live = max((a.generation for a in visible), default=0), None, set[Attempt]()
    while True:
        live |= {a for a in visible if a.generation == generation and (end is None or a.step < end.step or a == end)}
        end = parents.get(generation)
        if end is None:
            return live
        generation = end.generation


def lives(few: int) -> settings:
    """How many are tried: as many as CKPTD_LIFE_CYCLES says, or a few."""
    number = int(os.environ.get("CKPTD_LIFE_CYCLES", few))
    return settings(max_examples=number, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


def receipt_holders(stored: StoredReceipt) -> list[Attempt]:
    """Whose optimizer state a receipt references."""
    return referenced_attempts(stored.receipt.content, optimizer=True)


RUN = "gpt"


class LifeCycle(RuleBasedStateMachine):
    """One run on one store, and all processes that use it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.store: Store = DictStore(self.clock)
        self.lives: dict[Attempt, Life] = {}
        self.orphans: dict[Attempt, bool] = {}
        """Undecided attempts, and whether all of their receipts are there."""
        self.frozen: dict[Attempt, tuple[Attempt, Attempt, tuple[Attempt, ...]]] = {}
        """Of attempts that reference: who holds the chunks that are the same in all of them, and the bases."""
        self.state = states()
        self.parents: dict[int, Attempt | None] = {}
        self.leases: dict[str, tuple[Attempt, float]] = {}

    # What happened after a call that may have crashed.

    def attempt_to(self, act: Callable[[Store], Any], fault: Faults | None) -> CkptError | None:
        """Do something, with a crash at one call to the store if there is a fault."""
        store = FaultyStore(self.store, Faults(fault.fail_at, fault.mode)) if fault else self.store
        try:
            act(store)
        except CkptError as error:
            return error
        return None

    def settle(self, may_change: dict[Attempt, set[str]], may_thin: dict[Attempt, set[str]] | None = None) -> None:
        """Learn from the store how far it got; only what may have changed may have."""
        listed = {c.attempt for c in list_checkpoints(Run(self.store, RUN))}
        for attempt, life in self.lives.items():
            found = "visible" if attempt in listed else "hidden" if self.recoverable(attempt) else "gone"
            if found != life.state:
                assert found in may_change.get(attempt, ()), f"{attempt} went from {life.state} to {found}"
                life.state = found  # type: ignore[assignment]
            thin = self.thin(attempt) if found != "gone" else life.thin
            if thin != life.thin:
                assert thin in (may_thin or {}).get(attempt, ()), f"{attempt} went from {life.thin} to {thin}"
                life.thin = thin

    def thin(self, attempt: Attempt) -> str:
        run = Run(self.store, RUN)
        ids = [id for other, id, _ in run.listed(run.keys.tombstones) if other == attempt and names.is_thinning(id)]
        keys = [run.keys.sweep_decision(attempt, id) for id in ids]
        swept = names.THINNED in ids or any(b'"swept":true' in (self.store.find(key) or b"") for key in keys)
        return "thinned" if swept else "thinning" if ids else "full"

    def holds_moments(self, attempt: Attempt, by: str = "visible hidden") -> bool:
        leased = any(a == attempt and until > self.clock() for a, until in self.leases.values())
        others = (life for other, life in self.lives.items() if other != attempt and life.state in by)
        needed = any(life.moments == attempt and life.thin != "thinned" for life in others)
        return leased or bool(self.lives[attempt].pins) or needed

    def recoverable(self, attempt: Attempt) -> bool:
        run = Run(self.store, RUN)
        decisions = {names.attempt_and_name(i.key): i.key for i in self.store.list(run.keys.sweep_decisions)}
        ids = [h.id for h in list_hidden(run) if h.attempt == attempt and not h.thins]
        swept = [b'"swept":true' in self.store.get(decisions[attempt, id]) for id in ids if (attempt, id) in decisions]
        return bool(ids) and not any(swept)

    def held(self, attempt: Attempt, by: str = "visible hidden") -> bool:
        """by: the states of the checkpoints whose references count. A hidden one keeps data, but hides nothing less."""
        leased = any(a == attempt and until > self.clock() for a, until in self.leases.values())
        others = [life for other, life in self.lives.items() if other != attempt and life.state in by]
        referenced = any(attempt in (life.frozen, life.moments, *life.bases) for life in others)
        return leased or bool(self.lives[attempt].pins) or referenced

    def holds_all_moments(self, attempt: Attempt) -> bool:
        """Whether all of its optimizer state can be read."""
        life = self.lives[attempt]
        holder = self.lives[life.moments]
        return "thinned" not in (life.thin, holder.thin) and holder.state != "gone"

    def damaged(self, attempt: Attempt) -> bool:
        """Whether it cannot be read whole, through its own fault or through that of what it references."""
        life = self.lives[attempt]
        return (
            bool(life.flipped) or -1 in self.lives[life.frozen].flipped or any(map(self.changing_damaged, life.bases))
        )

    def changing_damaged(self, attempt: Attempt) -> bool:
        """Whether the chunk that always changes is damaged."""
        life = self.lives[attempt]
        return 0 in life.flipped or (life.frozen != attempt and bool(life.flipped))

    def data_bytes(self) -> int:
        return sum(info.bytes for info in self.store.list(RunKeys(RUN).attempts) if info.key.endswith(".ckpt"))

    def some(self, number: int, *states: str) -> Attempt | None:
        found = sorted(a for a, life in self.lives.items() if life.state in states)
        return found[number % len(found)] if found else None

    def listed(self, attempt: Attempt) -> Checkpoint:
        (found,) = (c for c in list_checkpoints(Run(self.store, RUN)) if c.attempt == attempt)
        return found

    @property
    def generation(self) -> int:
        return max(self.parents, default=0)

    # Saves.

    @rule(number=pick, resumes=st.booleans(), fault=faults)
    def begin(self, number: int, resumes: bool, fault: Faults | None) -> None:
        """A trainer takes over, from any checkpoint or from scratch."""
        session = Session(new_ulid(self.clock()), self.some(number, "visible") if resumes else None)
        self.attempt_to(lambda s: begin_generation(Run(s, RUN, self.clock), session), fault)
        begun = begin_generation(Run(self.store, RUN, self.clock), session)
        assert begun.number == self.generation + 1
        self.parents[begun.number] = session.parent

    @rule(number=pick, step=st.integers(0, 12))
    def save_too_late(self, number: int, step: int) -> None:
        """By a trainer that another one has replaced."""
        if not self.generation:
            return
        attempt = Attempt(step, new_ulid(self.clock()), generation=number % self.generation)
        receipt = write_rank(self.store, RUN, attempt, next(self.state), clock=self.clock)
        self.orphans[attempt] = True
        error = self.attempt_to(lambda s: commit_attempt(Run(s, RUN, self.clock), [receipt]), None)
        assert isinstance(error, Superseded)
        self.settle_orphans()

    @rule(step=st.integers(0, 12), loss=st.floats(0, 1))
    def save(self, step: int, loss: float) -> None:
        state, number = next(self.state), self.generation
        found = write_checkpoint(self.store, RUN, step, state, {"loss": loss}, self.clock, generation=number)
        self.lives[found.attempt] = Life(step, found.attempt, found.attempt)
        self.clock.now += 1

    @rule(
        number=pick, step=st.integers(0, 12), loss=st.floats(0, 1), moments=st.booleans(), deltas=st.booleans(),
        fault=faults,
    )  # fmt: skip
    def reference(
        self, number: int, step: int, loss: float, fault: Faults | None, moments: bool = True, deltas: bool = False
    ) -> None:
        """A save that stores what is new, and references the rest, in a checkpoint that may be on its way out.

        deltas: what is new is stored as a delta, if it can be made.
        """
        base = self.some(number, "visible", "hidden")
        if base is None:
            return
        deltas = deltas and not self.damaged(base) and self.holds_all_moments(base)
        bases = (*self.lives[base].bases, base) if deltas else ()
        attempt = Attempt(step, new_ulid(self.clock()), generation=self.generation)
        frozen, of_moments, state = self.lives[base].frozen, self.lives[base].moments, next(self.state)
        if not moments:
            state["optim/a"] = np.full(60, state["optim/step"][0], np.float32)
        receipt = write_rank(
            self.store, RUN, attempt, state, 0, 1, {"loss": loss}, self.clock, base=base, deltas=deltas
        )
        assert set(bases) <= set(referenced_attempts(receipt.receipt.content))
        moments = of_moments in receipt_holders(receipt)
        self.frozen[attempt] = frozen, of_moments if moments else attempt, bases
        self.orphans[attempt] = True
        error = self.attempt_to(lambda s: commit_attempt(Run(s, RUN, self.clock), [receipt]), fault)
        self.clock.now += 1
        if fault is None:
            whole = not moments or (self.lives[of_moments].state, self.lives[of_moments].thin) == ("visible", "full")
            there = all(self.lives[one].state == "visible" for one in (frozen, *bases))
            assert (error is None) == (there and whole)
            assert error is None or isinstance(error, ReferenceLost)
        self.settle_orphans()
        assert error is not None or attempt in self.lives

    @rule(step=st.integers(0, 12), complete=st.booleans())
    def save_and_die(self, step: int, complete: bool) -> None:
        attempt = Attempt(step, new_ulid(self.clock()), generation=self.generation)
        for rank in range(2 if complete else 1):
            write_rank(self.store, RUN, attempt, next(self.state) if rank == 0 else {}, rank, 2, clock=self.clock)
        self.orphans[attempt] = complete

    # Deletions.

    @rule(policy=policies, grace_s=graces, fault=faults)
    def prune(self, policy: Policy, grace_s: float, fault: Faults | None) -> None:
        run = Run(self.store, RUN, self.clock)
        plan = plan_prune(run, policy)
        for checkpoint in plan.remove:
            assert not self.held(checkpoint.attempt)
        newest = next(newest_first(run), None)
        assert newest not in (*plan.remove, *plan.thin)
        for checkpoint in plan.thin:
            assert not self.holds_moments(checkpoint.attempt, by="visible")
        before = self.data_bytes()
        error = self.attempt_to(lambda s: apply_prune(Run(s, RUN, self.clock, "me"), plan, grace_s=grace_s), fault)
        assert error is None or isinstance(error, StoreUnavailable)
        going = {"hidden", "gone"} if not grace_s else {"hidden"}
        thinner = {"thinning", "thinned"} if not grace_s else {"thinning"}
        self.settle(
            {checkpoint.attempt: going for checkpoint in plan.remove},
            {c.attempt: {*thinner, "thinned"} if c in plan.remove else thinner for c in (*plan.thin, *plan.remove)},
        )
        done = all(self.lives[c.attempt].state == "gone" for c in plan.remove)
        if error is None and done and all(self.lives[c.attempt].thin == "thinned" for c in plan.thin):
            pending = sum(c.thinned for c in plan.remove)  # their optimizer state was not counted any more
            assert pending or before - self.data_bytes() == plan.freed_bytes
        if error is None:
            assert not {c.attempt for c in plan.remove} & {a for a, v in self.lives.items() if v.state == "visible"}

    @rule(number=pick, grace_s=graces, fault=faults)
    def delete(self, number: int, grace_s: float, fault: Faults | None) -> None:
        attempt = self.some(number, "visible")
        if attempt is None:
            return
        checkpoint = self.listed(attempt)
        error = self.attempt_to(
            lambda s: delete_checkpoint(Run(s, RUN, self.clock), checkpoint.attempt, "test", grace_s, force=True), fault
        )
        if self.held(attempt, by="visible"):
            assert isinstance(error, CheckpointHeld | StoreUnavailable)
            self.settle({})
        else:
            # A process that died while it referenced it may have left its mark.
            marked = attempt in {mark.attempt for mark in marks(Run(self.store, RUN))}
            assert (
                error is None or isinstance(error, StoreUnavailable) or (marked and isinstance(error, CheckpointHeld))
            )
            self.settle({attempt: {"hidden", "gone"} if not grace_s else {"hidden"}})

    @rule(number=pick, fault=faults)
    def undelete(self, number: int, fault: Faults | None) -> None:
        attempt = self.some(number, "visible", "hidden", "gone")
        if attempt is None:
            return
        before, thin = self.lives[attempt].state, self.lives[attempt].thin
        error = self.attempt_to(lambda s: undelete(Run(s, RUN, self.clock, "me"), attempt), fault)
        thinning = before == "visible" and thin == "thinning"
        self.settle({attempt: {"visible"}} if before == "hidden" else {}, {attempt: {"full"}} if thinning else {})
        if fault is None:
            if thinning:
                assert error is None
                assert self.lives[attempt].thin == "full"
            elif before == "hidden":
                assert error is None
                assert self.lives[attempt].state == "visible"
            else:
                assert isinstance(
                    error, NoCheckpoint if (before, thin) == ("visible", "full") else NoCheckpoint | SweepBegun
                )

    @rule(fault=faults)
    def collect(self, fault: Faults | None) -> None:
        error = self.attempt_to(lambda s: collect(Run(s, RUN, self.clock)), fault)
        assert error is None or isinstance(error, StoreUnavailable)
        # An undelete that crashed is finished.
        may = {
            attempt: {"gone", "visible"}
            for attempt, life in self.lives.items()
            if life.state == "hidden" and not self.held(attempt)
        }
        thinning = {a: "full" for a, life in self.lives.items() if life.thin == "thinning" and life.state != "gone"}
        self.settle(may, {a: {"full"} if self.holds_moments(a) else {"full", "thinned"} for a in thinning})
        self.settle_orphans()

    def settle_orphans(self) -> None:
        run = Run(self.store, RUN)
        listed = {c.attempt for c in list_checkpoints(run)}
        for attempt, complete in list(self.orphans.items()):
            left = list(self.store.list(run.keys.attempt(attempt)))
            if attempt in listed:
                assert complete, "an attempt without all receipts was committed"
                self.lives[attempt] = Life(attempt.step, *self.frozen.get(attempt, (attempt, attempt, ())))
                del self.orphans[attempt]
            elif not left:
                age = self.clock() - names.ulid_time(attempt.ulid)
                superseded = attempt.generation < self.generation
                assert age >= ORPHAN_GRACE_S or not complete or superseded, "a save was given up too early"
                del self.orphans[attempt]

    # Holds.

    @rule(number=pick, hours=st.integers(1, 60), weights=st.booleans(), fault=faults)
    def lease(self, number: int, hours: int, weights: bool, fault: Faults | None) -> None:
        attempt = self.some(number, "visible", "hidden")
        if attempt is None:
            return
        granted: list[str] = []
        error = self.attempt_to(
            lambda s: granted.append(take_lease(Run(s, RUN, self.clock), attempt, "reader", hours * HOUR_S, weights)),
            fault,
        )
        if granted:
            assert self.lives[attempt].state == "visible"
            assert weights or self.lives[attempt].thin == "full"
            self.leases[granted[0]] = (attempt, self.clock() + hours * HOUR_S + MAX_SKEW_S)
        elif isinstance(error, StoreUnavailable):
            # A lease whose holder is gone holds all the same, until it expires.
            for info in self.store.list(RunKeys(RUN).leases):
                id = info.key.rsplit("/", 1)[-1].removesuffix(".json")
                self.leases.setdefault(id, (attempt, self.clock() + hours * HOUR_S + MAX_SKEW_S))

    @rule(number=pick)
    def release(self, number: int) -> None:
        if self.leases:
            id = sorted(self.leases)[number % len(self.leases)]
            release_lease(Run(self.store, RUN), id)
            del self.leases[id]

    @rule(number=pick, name=st.sampled_from(["paper", "demo"]), weights=st.booleans(), fault=faults)
    def pin(self, number: int, name: str, weights: bool, fault: Faults | None) -> None:
        attempt = self.some(number, "visible", "hidden")
        if attempt is None:
            return
        error = self.attempt_to(lambda s: pin(Run(s, RUN, self.clock, "me"), attempt, name, "", weights), fault)
        if fault is None:
            life = self.lives[attempt]
            assert (error is None) == (life.state == "visible" and (weights or life.thin == "full"))
        self.lives[attempt].pins = set(pinned(Run(self.store, RUN)).get(attempt, ()))

    @rule(number=pick, name=st.sampled_from(["paper", "demo"]))
    def unpin(self, number: int, name: str) -> None:
        attempt = self.some(number, "visible", "hidden")
        if attempt is not None:
            unpin(Run(self.store, RUN, self.clock, "me"), attempt, name)
            self.lives[attempt].pins.discard(name)

    # Damage, found and repaired.

    @rule(number=pick, at=st.sampled_from([0, -1]))
    def flip(self, number: int, at: int) -> None:
        attempt = self.some(number, "visible")
        if attempt is not None:
            key = RunKeys(RUN).shard(attempt, "shard-00000.ckpt")
            data = bytearray(self.store.get(key))
            data[at] ^= 1
            self.store.put(key, bytes(data))
            self.lives[attempt].flipped ^= {at}

    @rule(number=pick)
    def scrub(self, number: int) -> None:
        attempt = self.some(number, "visible")
        if attempt is not None:
            (result,) = scrub(self.store, [self.listed(attempt)], "me", self.clock)
            assert result.ok == (not self.damaged(attempt))
            self.lives[attempt].quarantined = not result.ok

    # Time.

    @rule(hours=st.sampled_from([0.1, 2, 25, 24 * 8]))
    def wait(self, hours: float) -> None:
        self.clock.now += hours * HOUR_S
        self.leases = {id: lease for id, lease in self.leases.items() if lease[1] > self.clock()}

    @rule(hours=st.sampled_from([-30, -1, 1, 30, 24 * 30]))
    def jump(self, hours: float) -> None:
        """The clock of a collector is wrong: it finds out and deletes nothing."""
        self.clock.jump_s = hours * HOUR_S
        try:
            check_store(self.store, self.clock)
        except StoreUnsafe:
            return
        finally:
            self.clock.jump_s = 0.0
        raise AssertionError("a wrong clock was believed")

    # What must be true after every step.

    @invariant()
    def what_is_listed_is_whole(self) -> None:
        listed = list_checkpoints(Run(self.store, RUN))
        assert {c.attempt for c in listed} == {a for a, life in self.lives.items() if life.state == "visible"}
        source = StoreSource(self.store, self.clock)
        for checkpoint in listed:
            life = self.lives[checkpoint.attempt]
            assert (checkpoint.state is State.CORRUPT) == life.quarantined
            if not self.damaged(checkpoint.attempt) and not life.quarantined:
                assert verify(source, checkpoint, threads=1).ok, f"{checkpoint.id} is listed and broken"
                if life.thin == "thinning":
                    assert verify(source, replace(checkpoint, thinned=False), threads=1).ok, "it cannot be taken back"
            assert checkpoint.thinned == (life.thin != "full")

    @invariant()
    def the_latest_is_the_newest_of_the_lineage(self) -> None:
        live = lineage([a for a, life in self.lives.items() if life.state == "visible"], self.parents)
        lesser = {c.attempt for c in list_checkpoints(Run(self.store, RUN)) if c.state is State.SUPERSEDED or c.thinned}
        usable = [(a.generation, a.step) for a in live if not self.lives[a].quarantined and a not in lesser]
        found = next(newest_first(Run(self.store, RUN)), None)
        assert ((found.attempt.generation, found.step) if found else None) == max(usable, default=None)
        for checkpoint in list_checkpoints(Run(self.store, RUN)):
            if not self.lives[checkpoint.attempt].quarantined and checkpoint.state is not State.SUPERSEDED:
                assert (checkpoint.state is State.ABANDONED) == (checkpoint.attempt not in live)

    @invariant()
    def what_is_held_is_there(self) -> None:
        for attempt, life in self.lives.items():
            if life.state != "gone" and self.held(attempt):
                assert list(self.store.list(RunKeys(RUN).attempt(attempt)))

    @invariant()
    def what_is_referenced_is_there(self) -> None:
        for attempt, life in self.lives.items():
            if life.state != "gone":
                for one in (life.frozen, *life.bases):
                    assert self.lives[one].state != "gone", f"{attempt} needs what is gone"
                if life.thin != "thinned":
                    holder = self.lives[life.moments]
                    assert (holder.state != "gone", holder.thin != "thinned") == (True, True), f"{attempt} lost moments"

    @precondition(lambda self: self.lives)
    @invariant()
    def hidden_is_not_lost(self) -> None:
        for attempt, life in self.lives.items():
            if life.state == "hidden":
                assert len(list(self.store.list(RunKeys(RUN).attempt(attempt)))) >= 3

    def teardown(self) -> None:
        """In the end, what is not listed has left no byte."""
        run = Run(self.store, RUN, self.clock, "me")
        for id in self.leases:
            release_lease(run, id)
        for attempt, life in self.lives.items():
            for name in life.pins:
                unpin(run, attempt, name)
        for _ in range(3):
            self.clock.now += TOMBSTONE_KEPT_S + HOUR_S
            collect(run)
            self.settle_orphans()
        left = {a.attempt for a in list_checkpoints(run)}
        assert {Attempt.parse(n) for n in self.store.list_folders(run.keys.attempts)} == left
        for prefix in (run.keys.sweep_decisions, run.keys.leases):
            assert list(self.store.list(prefix)) == []
        thinnings = {(a, names.is_thinning(id)) for a, id, _ in run.listed(run.keys.tombstones)}
        assert thinnings == {(a, True) for a in left if self.thin(a) != "full"}
        for prefix in (run.keys.commits, run.keys.verified, run.keys.quarantine):
            assert left.issuperset(listed_attempts(run, prefix))
        holders = [(a, one) for a, life in self.lives.items() if a in left for one in (life.frozen, *life.bases)]
        needed = {Mark(one, a) for a, one in holders if one != a}
        both = [(a, life.moments) for a, life in self.lives.items() if a in left and life.moments != a]
        needed |= {Mark(moments, a) for a, moments in both}
        assert set(marks(run)) == needed | {Mark(m, a, True) for a, m in both if self.thin(a) != "thinned"}
