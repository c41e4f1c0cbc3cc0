"""Deletion of checkpoints and collection of orphans. A crash at any point leaves a valid state.

A deletion hides checkpoints (tombstones.py); a collection sweeps those whose grace is over. An orphan (an attempt
without an outcome) is first aborted, then deleted. Deletions are idempotent, and any process may finish a partial one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from ckptstore.commits import audit
from ckptstore.commits.catalog import decided_attempts, newest_first, visible_attempts
from ckptstore.commits.commit import decide, read_outcome, roll_forward
from ckptstore.commits.heartbeats import old_heartbeats
from ckptstore.commits.hidden import bury, hidden_attempts, listed_attempts
from ckptstore.commits.leases import active_leases, expired_leases
from ckptstore.commits.references import marks, unmark
from ckptstore.errors import (
    AttemptAborted,
    CheckpointHeld,
    Damaged,
    InvalidName,
    NoCheckpoint,
    ObjectMissing,
    ReferenceLost,
    Superseded,
    SweepBegun,
)
from ckptstore.format.documents import Outcome
from ckptstore.format.records import Action
from ckptstore.names import Attempt, Reference
from ckptstore.retention.pins import write_pin
from ckptstore.retention.tombstones import (
    SWEEP_GRACE_S,
    TOMBSTONE_KEPT_S,
    delete_data,
    delete_leftovers,
    find_hidden,
    forget_tombstones,
    has_data,
    hide,
    list_fates,
    list_hidden,
    read_tombstone,
    sweep,
    undelete,
)
from ckptstore.run import Run

ORPHAN_GRACE_S = 24 * 3600.0
"""An attempt without an outcome and without a lease is aborted when its newest object is this old."""
_READERS = 16


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did to one run."""

    swept: tuple[Attempt, ...]
    """Hidden before, and permanently deleted now."""
    rolled_forward: tuple[Attempt, ...]
    aborted: tuple[Attempt, ...]
    freed_bytes: int


class CollectReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a collection did to one run, by checkpoint id."""

    run: str
    swept: list[str]
    rolled_forward: list[str]
    aborted: list[str]
    freed_bytes: int

    @classmethod
    def of(cls, run: Run, done: Collected) -> CollectReport:
        """The report of a collection of this run."""
        return cls(
            run=run.name,
            swept=list(map(run.id_of, done.swept)),
            rolled_forward=list(map(run.id_of, done.rolled_forward)),
            aborted=list(map(run.id_of, done.aborted)),
            freed_bytes=done.freed_bytes,
        )


def delete_checkpoint(run: Run, attempt: Attempt, reason: str, grace_s: float = 0.0, force: bool = False) -> None:
    """Delete one checkpoint, regardless of policies: hidden on return; with a grace of 0 permanently deleted.

    force: even if it is the newest one of the run that a restore can use. Raises CheckpointHeld otherwise, or
    CheckpointHeld if something holds it; nothing is changed in that case.
    """
    newest = None if force else next(newest_first(run), None)
    if newest is not None and newest.attempt == attempt:
        raise CheckpointHeld(
            f"{run.id_of(attempt)} is the newest checkpoint of run {run.name!r}, which restores use",
            "Nothing was deleted. To delete it all the same, use --force, force=true or force=True",
        )
    held = hide(run, [attempt], reason, grace_s)
    if held:
        raise CheckpointHeld(
            f"{run.id_of(attempt)} is held by {', '.join(held[attempt])}",
            "Wait for the lease to end, remove the pin, or delete the referencing checkpoints first",
        )
    if not grace_s:
        sweep(run, only=[attempt])


def collect(run: Run, grace_s: float = ORPHAN_GRACE_S) -> Collected:
    """Sweep what is due, and clean up after crashes: partial deletions, complete but uncommitted attempts, orphans.

    grace_s: an orphan is aborted after nothing was written to it for this time. Ages are differences between the
    store's times and `run.clock`, which must not be minutes apart (checks.check_store).
    """
    swept = sweep(run)
    hidden = hidden_attempts(run)
    rolled, aborted = [], []
    decided = set(decided_attempts(run))
    outcomes = _outcomes(run, [attempt for attempt in decided if attempt not in hidden])
    present = _attempts_with_data(run)
    dead = {attempt for attempt in decided if attempt in hidden.dead}
    dead |= {attempt for attempt in present if attempt in hidden.dead and has_data(run, attempt)}
    freed = swept.freed_bytes + delete_leftovers(run, dead)
    for attempt in present:
        if attempt in hidden:
            continue
        if attempt not in decided and advance(run, attempt):
            rolled.append(attempt)
        elif attempt in outcomes and outcomes[attempt].committed is not None:
            continue
        elif _abort_if_old(run, attempt, grace_s):
            audit.record(run, Action.ABORT, [attempt], "an orphan")
            freed += delete_data(run, attempt)
            aborted.append(attempt)
    run.store.abort_uploads(run.keys.attempts, run.clock() - max(grace_s, ORPHAN_GRACE_S))
    _forget(run, outcomes)
    return Collected(swept.attempts, tuple(rolled), tuple(aborted), freed)


def advance(run: Run, attempt: Attempt) -> bool:
    """Commit an undecided attempt if all of its receipts exist, unless a newer generation has begun. True if it is now
    committed."""
    try:
        return roll_forward(run, attempt) is not None
    except (AttemptAborted, ReferenceLost, Superseded, Damaged, ObjectMissing):  # missing: another collector was faster
        return False


def undecided_attempts(run: Run) -> list[Attempt]:
    """Attempts that have data but no outcome, and are not hidden, oldest step first."""
    return undecided_and_decided(run)[0]


def undecided_and_decided(run: Run) -> tuple[list[Attempt], list[Attempt]]:
    """The undecided attempts, as above, and the decided ones, newest generation and step first.

    An attempt that was complete when this call began is in one of them, or hidden.
    """
    with ThreadPoolExecutor(2) as pool:  # in any order: an outcome created between the two is in one of them
        present, decided = pool.map(lambda listed: [*listed(run)], (_attempts_with_data, decided_attempts))
    known = set(decided)
    left = [attempt for attempt in present if attempt not in known]
    hidden = hidden_attempts(run) if left else ()  # last: an outcome is not deleted before its tombstone exists
    return [attempt for attempt in left if attempt not in hidden], decided


def _attempts_with_data(run: Run) -> Sequence[Attempt]:
    found = []
    for name in run.store.list_folders(run.keys.attempts):
        try:
            found.append(Attempt.parse(name))
        except InvalidName:
            continue
    return found


def _abort_if_old(run: Run, attempt: Attempt, grace_s: float) -> bool:
    """True if the attempt is aborted, by this call or earlier."""
    try:
        outcome = read_outcome(run, attempt)
    except Damaged:
        return False
    if outcome is None:
        newest = max((info.modified_at for info in run.store.list(run.keys.attempt(attempt))), default=None)
        if newest is None or run.age_s(newest) < grace_s or attempt in active_leases(run):
            return False  # leased: the copy of a carrier, which will continue it
        outcome = decide(run, attempt, None)
    return outcome.committed is None


def _forget(run: Run, outcomes: Mapping[Attempt, Outcome]) -> None:
    """Remove expired leases and old records. Old deletions and aborts are replaced by the list of the dead."""
    run.store.delete_many(expired_leases(run))
    forget_tombstones(run)
    audit.forget_old(run)
    run.store.delete_many(old_heartbeats(run))
    _forget_marks(run)
    _forget_aborted(run, outcomes)


def _forget_marks(run: Run) -> None:
    """Remove marks of attempts without data: aborted, or swept by a process that crashed."""
    # Marks first: an attempt writes its receipts before its marks.
    listed = marks(run)
    if listed:
        present, decided = set(_attempts_with_data(run)), set(decided_attempts(run))
        by = {found.by for found in listed} - decided
        gone = {attempt for attempt in by if attempt not in present or not has_data(run, attempt)}
        unmark(run, [found for found in listed if found.by in gone or found.by not in present])


def _forget_aborted(run: Run, outcomes: Mapping[Attempt, Outcome]) -> None:
    """Remove aborted outcomes a week after the data is deleted. The list of the dead names the attempts by then."""
    listed = list(run.store.list(run.keys.commits))
    old = listed_attempts(info.key for info in listed if run.age_s(info.modified_at) > TOMBSTONE_KEPT_S)
    known = {**outcomes, **_outcomes(run, [attempt for attempt in old if attempt not in outcomes])}
    aborted = {attempt for attempt in old if attempt in known and known[attempt].committed is None}
    gone = {attempt for attempt in aborted if not has_data(run, attempt)}
    run.store.delete_many(run.keys.outcome(attempt) for attempt in sorted(bury(run, gone)))


def _outcomes(run: Run, attempts: Iterable[Attempt]) -> dict[Attempt, Outcome]:
    """The outcomes of these attempts, without damaged ones. They never change, so each is read once per collection."""

    def read(attempt: Attempt) -> Outcome | None:
        try:
            return read_outcome(run, attempt)
        except Damaged:
            return None

    listed = list(attempts)
    with ThreadPoolExecutor(_READERS) as pool:
        found = zip(listed, pool.map(read, listed), strict=True)
        return {attempt: outcome for attempt, outcome in found if outcome is not None}


UNDELETED = "undeleted"
"""The name of the pin that an undelete adds."""
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes in the store that belong to a run but to none of its visible checkpoints."""

    orphans: int
    """Bytes of undecided attempts that were not written to for an hour."""
    tombstoned: int
    """Bytes of checkpoints that are hidden and not swept yet."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is hidden and can be undeleted until `until`."""

    id: str
    by: str
    at: float
    reason: str
    until: float


def measure_waste(run: Run) -> Waste:
    """The bytes that a collection could free. Lists every such attempt; changes nothing."""
    undecided = (_extent(run, attempt) for attempt in undecided_attempts(run))
    # Most hidden attempts have no data any more: their tombstones stay for a week.
    hidden = {found.attempt for found in list_hidden(run)}.intersection(_attempts_with_data(run))
    return Waste(
        orphans=sum(num_bytes for num_bytes, newest in undecided if run.age_s(newest) > _IDLE_S),
        tombstoned=sum(_extent(run, attempt)[0] for attempt in hidden),
    )


def _extent(run: Run, attempt: Attempt) -> tuple[int, float]:
    """The bytes of an attempt, and the time of its last write."""
    objects = list(run.store.list(run.keys.attempt(attempt)))
    return sum(info.bytes for info in objects), max((info.modified_at for info in objects), default=0.0)


def undelete_checkpoint(run: Run, reference: Reference, reason: str = "") -> Reference:
    """Undo a deletion permanently: the checkpoint is listed and pinned on return. Returns its full name.

    Without the pin, the policy that deleted it would delete it again. A call that fails may be repeated.
    Raises NoCheckpoint or SweepBegun: the checkpoint is not pinned in that case.
    """
    attempt = find_hidden(run, reference)
    # The pin first: the checkpoint is never listed without it.
    write_pin(run, attempt, UNDELETED)
    try:
        undelete(run, attempt, reason)
    except (NoCheckpoint, SweepBegun) as error:
        if isinstance(error, NoCheckpoint) and attempt in visible_attempts(run):
            return Reference(run.name, attempt.step, attempt.ulid)  # another undelete was faster
        run.store.delete_many([run.keys.pin(attempt, UNDELETED)])
        raise
    return Reference(run.name, attempt.step, attempt.ulid)


def list_deleted(run: Run) -> list[Deleted]:
    """The hidden checkpoints of a run that still have their data, newest step first."""
    left = set(decided_attempts(run))
    decided = list_fates(run)
    found = []
    for hidden in reversed(list_hidden(run)):
        if hidden.attempt not in left or (hidden.attempt, hidden.id) in decided:
            continue
        tombstone = read_tombstone(run, hidden)
        found.append(
            Deleted(
                id=run.id_of(hidden.attempt),
                by=tombstone.by if tombstone else "",
                at=hidden.written_at,
                reason=tombstone.reason if tombstone else "",
                until=hidden.written_at + (tombstone.grace_s if tombstone else SWEEP_GRACE_S),
            )
        )
    return found
