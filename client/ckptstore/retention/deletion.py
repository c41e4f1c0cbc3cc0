"""Two-phase deletion of checkpoints, and collection of what crashes leave.

A deletion hides a checkpoint by a tombstone of its own; after a grace a sweep deletes the data, unless the deletion is
undone. A create-only object, the sweep decision of the tombstone, decides between the two, so that an undelete and a
sweep never both win. A checkpoint is hidden while it has any tombstone. A tombstone is removed only after its sweep
decision is "undeleted", or a week after the data is deleted, when the attempt is on the list of deleted attempts
(commits/hidden.py). docs/decisions/0012 has the sequences.

Thinning deletes the optimizer state alone, in the same two phases, with a tombstone that does not hide the checkpoint.
After the sweep an object named THINNED is left in its place (docs/decisions/0044).

A collection sweeps what is due. An orphan (an attempt without an outcome) is first aborted, then deleted. A crash at
any point leaves a valid state: deletions are idempotent, and any process may finish a partial one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf
from typing import NamedTuple

from ckptstore import names
from ckptstore.commits import audit
from ckptstore.commits.catalog import decided_attempts, newest_first, visible_attempts
from ckptstore.commits.commit import decide, read_outcome, roll_forward
from ckptstore.commits.heartbeats import old_heartbeats
from ckptstore.commits.hidden import DeletedAttempts, hidden_attempts, record_deleted
from ckptstore.commits.labels import label_versions
from ckptstore.commits.leases import active_leases, expired_leases
from ckptstore.commits.references import marks, unmark
from ckptstore.errors import (
    AttemptAborted,
    CheckpointHeld,
    CorruptObject,
    Damaged,
    InvalidName,
    NoCheckpoint,
    ObjectMissing,
    ReferenceLost,
    StoreUnavailable,
    Superseded,
    SweepBegun,
    UnsupportedObject,
)
from ckptstore.format.documents import Outcome, Tombstone, oldest_format
from ckptstore.format.parsing import seal
from ckptstore.format.records import Action, SweepDecision
from ckptstore.names import (
    THINNED,
    Attempt,
    Reference,
    is_thinning,
    is_ulid,
    new_ulid,
)
from ckptstore.retention.pins import Holds, active_holds, holds_optimizer, write_pin
from ckptstore.retry import retry
from ckptstore.run import Run
from ckptstore.stores import ObjectInfo
from ckptstore.threads import in_parallel
from ckptstore.values import Record

SWEEP_GRACE_S = 24 * 3600.0
"""Default time for which a deletion can be undone."""
TOMBSTONE_KEPT_S = 7 * 24 * 3600.0
"""Tombstones, sweep decisions and aborted outcomes are kept so long. Then the list of deleted attempts replaces
them."""

_TRIES = 3


@dataclass(frozen=True, slots=True, order=True)
class Hidden:
    """One tombstone, or its sweep decision, in a listing."""

    attempt: Attempt
    id: str
    written_at: float = field(default=0.0, compare=False)
    """By the store's clock."""

    @property
    def thins(self) -> bool:
        """Whether it is about the optimizer state alone, and hides nothing."""
        return is_thinning(self.id)

    def key(self, run: Run) -> str:
        """The key of the tombstone."""
        return run.keys.tombstone(self.attempt, self.id)


class Swept(NamedTuple):
    """The result of a sweep of one run."""

    attempts: tuple[Attempt, ...]
    """Attempts that this sweep decided; their data is deleted."""
    freed_bytes: int


def hide(
    run: Run,
    attempts: Sequence[Attempt],
    reason: str,
    grace_s: float = SWEEP_GRACE_S,
    progress: Callable[[Attempt], None] = lambda _: None,
    thins: bool = False,
) -> Holds:
    """Phase 1: remove these checkpoints from listings; durable on return. thins: list them as thinned instead.

    Returns the held ones, and why: they were not hidden, or were listed again because a hold was taken concurrently.
    A call that fails may have hidden some of them, and may be repeated. The grace is at least the store's
    `listing_lag_s`, so that this process sees the leases of all hosts before the data is deleted.
    """
    grace_s = max(grace_s, run.store.listing_lag_s)
    # The sweep asks again, and counts all references: the data stays while a hidden checkpoint that needs it is left.
    held = dict(_holds(run, thins, hidden_attempts(run)))
    if free := [attempt for attempt in attempts if attempt not in held]:
        audit.record(run, Action.THIN if thins else Action.DELETE, free, reason)
    hidden = {}
    for attempt in attempts:
        if attempt not in held:
            id = "thin-" * thins + new_ulid(run.clock())
            hidden[attempt] = write_tombstone(run, attempt, id, reason, grace_s)
        progress(attempt)
    late = _holds(run, thins, hidden_attempts(run)) if hidden else {}
    for attempt in hidden.keys() & late.keys():
        if _cancel_deletion(run, attempt, [hidden[attempt]]):
            held[attempt] = late[attempt]
    return {attempt: held[attempt] for attempt in attempts if attempt in held}


def undelete(run: Run, attempt: Attempt, reason: str = "") -> None:
    """Undo a deletion, or else a thinning: the checkpoint is listed again on return, unchanged.

    Raises NoCheckpoint if it is not being deleted, or SweepBegun if its data is deleted or being deleted. A call that
    fails with another error may be repeated.
    """
    found = _first(hidden for hidden in list_hidden(run) if hidden.attempt == attempt)
    if not found:
        raise NoCheckpoint(f"{run.id_of(attempt)} is not being deleted", "ckptctl undelete lists what is")
    audit.record(run, Action.UNDELETE, [attempt], reason)
    # A tombstone with a long grace may be left when the one that was swept is forgotten.
    if not _has_outcome(run, attempt) or not _cancel_deletion(run, attempt, found):
        raise SweepBegun(
            f"{run.id_of(attempt)} can no longer be undeleted: its data is deleted or being deleted",
            "Use another checkpoint",
        )


def sweep(run: Run, only: Collection[Attempt] | None = None) -> Swept:
    """Phase 2: delete checkpoints whose grace is over and that are not held, and finish sweeps that crashed.

    Their data is deleted on return. Ages are differences between the store's times and `run.clock`, which must not be
    minutes apart (checks.check_store). only: these attempts, at any age; on a store with a `listing_lag_s`, all that
    are due. Raises Unavailable: another call continues; or Damaged after all others are done: a checkpoint with a
    damaged sweep decision stays hidden and keeps its data.
    """
    only = None if run.store.listing_lag_s else only
    hidden = [h for h in list_hidden(run) if only is None or h.attempt in only]
    listed = set(_listed(run, run.keys.sweep_decisions))
    # Most deletions of the last week are complete. Their sweep decisions and tombstones are not read again and again.
    left = set(_present(run, {h.attempt for h in hidden if h in listed}))
    decided, damage = _sweep_decisions(run, [h for h in hidden if h in listed and h.attempt in left])
    # The undelete of these died before it removed the tombstone.
    run.store.delete_many([h.key(run) for h, is_swept in decided.items() if not is_swept])
    due = [h for h in hidden if h not in listed and (only is not None or _is_due(run, h))]
    held = {thins: _holds(run, thins) for thins in {h.thins for h in due}}
    due = [h for h in due if h.attempt not in held[h.thins]]
    if due:
        audit.record(run, Action.SWEEP, dict.fromkeys(h.attempt for h in due), "")
    decided |= {h: _decide(run, h, swept=True) for h in due}
    swept = [h for h, is_swept in decided.items() if is_swept and _is_left(run, h)]
    to_delete = {h.attempt for h in swept if not h.thins}
    freed = _delete(run, to_delete)
    freed += _thin(run, [h for h in swept if h.thins and h.attempt not in to_delete])
    for error in damage:
        raise error
    return Swept(tuple(dict.fromkeys(h.attempt for h in swept if h not in listed and not h.thins)), freed)


def list_hidden(run: Run) -> list[Hidden]:
    """All tombstones of a run, by attempt."""
    return sorted(_listed(run, run.keys.tombstones))


def find_hidden(run: Run, reference: Reference) -> Attempt:
    """The hidden attempt of a reference; if a step has several, the one saved last of those that are not swept.

    Raises NoCheckpoint.
    """
    found = [h.attempt for h in _first(h for h in list_hidden(run) if reference.means(h.attempt))]
    if not found:
        raise NoCheckpoint(f"{reference.missing} that is being deleted", "ckptctl undelete lists them")
    decided = decided_attempts(run)
    return max(found, key=lambda attempt: (attempt in decided, attempt))


def forget_tombstones(run: Run) -> None:
    """Remove tombstones and sweep decisions a week after the data is deleted. The list of deleted attempts names the
    attempts by then."""
    old = {
        decision
        for decision in _listed(run, run.keys.sweep_decisions)
        if run.age_s(decision.written_at) > TOMBSTONE_KEPT_S
    }
    hidden = old.intersection(list_hidden(run))
    decided, _ = _sweep_decisions(run, sorted(hidden))
    swept = {h.attempt for h, is_swept in decided.items() if is_swept}
    recorded = record_deleted(run, swept.difference(_present(run, swept)))
    # Those that are undeleted go, and those whose sweep decision is damaged stay.
    kept = {h for h in hidden if h.attempt not in recorded and decided.get(h, True)}
    # Tombstones first: a tombstone without its sweep decision could be decided again.
    run.store.delete_many([h.key(run) for h in sorted(hidden - kept)])
    run.store.delete_many([run.keys.sweep_decision(h.attempt, h.id) for h in sorted(old - kept)])


def delete_data(run: Run, attempt: Attempt, optimizer: bool = False) -> int:
    """Delete everything that an attempt wrote before its outcome. Returns the number of bytes freed.

    optimizer: its optimizer state alone.
    """
    # Receipts first: without them the rest is not mistaken for a complete attempt.
    objects = sorted(run.objects(attempt, optimizer), key=lambda info: names.receipt_rank(info.key) is None)
    run.store.delete_many(info.key for info in objects)
    return sum(info.bytes for info in objects)


def _holds(run: Run, thins: bool, hidden: Container[Attempt] = ()) -> Holds:
    """Holds of checkpoints or, if it `thins`, of their optimizer state."""
    found = active_holds(run, hidden)
    return {attempt: why for attempt, why in found.items() if not thins or holds_optimizer(why)}


def _first(hidden: Iterable[Hidden]) -> list[Hidden]:
    """The tombstones that hide something or, if there are none, those that thin."""
    found = list(hidden)
    return [h for h in found if not h.thins] or found


def _thin(run: Run, swept: Sequence[Hidden]) -> int:
    """Delete the optimizer state of attempts whose tombstone, which thins, is swept. Returns the number of bytes freed.

    A tombstone is removed last, so that another sweep finishes what a crash leaves.
    """
    freed = 0
    for hidden in swept:
        freed += delete_data(run, hidden.attempt, optimizer=True)
        write_tombstone(run, hidden.attempt, THINNED)
    attempts = {hidden.attempt for hidden in swept}
    if attempts:
        unmark(run, [found for found in marks(run) if found.by in attempts and found.optimizer])
    run.store.delete_many([hidden.key(run) for hidden in swept])
    return freed


def write_tombstone(run: Run, attempt: Attempt, id: str, reason: str = "", grace_s: float = 0.0) -> Hidden:
    """Durable on return. id: THINNED states that its optimizer state is deleted, or was never there."""
    hidden = Hidden(attempt, id)
    tombstone = Tombstone(
        format=oldest_format(attempt), kind="tombstone", attempt=str(attempt), by=run.by, at=run.clock(), reason=reason,
        grace_s=grace_s,
    )  # fmt: skip
    run.write(hidden.key(run), tombstone)
    return hidden


def _cancel_deletion(run: Run, attempt: Attempt, tombstones: Sequence[Hidden]) -> bool:
    """Undelete these tombstones of an attempt. False if one of them is decided as swept."""
    if any(_decide(run, one, swept=False) for one in tombstones):
        return False
    if not all(_is_left(run, one) for one in tombstones) and not _has_outcome(run, attempt):
        return False  # swept and forgotten
    if tombstones[0].thins and _is_left(run, Hidden(attempt, THINNED)):
        return False  # likewise
    run.store.delete_many(one.key(run) for one in tombstones)
    return True


def _decide(run: Run, hidden: Hidden, *, swept: bool) -> bool:
    """Create the sweep decision of a tombstone, unless there is one. Durable on return. Returns whether it is swept."""
    attempt = hidden.attempt
    proposal = SweepDecision(
        format=oldest_format(attempt), kind="fate", attempt=str(attempt), tombstone=hidden.id, swept=swept, by=run.by,
        at=run.clock(),
    )  # fmt: skip

    def once() -> bool:
        if run.store.put_if_absent(run.keys.sweep_decision(attempt, hidden.id), seal(proposal)):
            return swept
        # After a lost reply this may be our own sweep decision, which then counts like any other.
        if (is_swept := _is_swept(run, hidden)) is None:
            raise StoreUnavailable(
                f"cannot read whether {run.id_of(attempt)} in {run.store.url} is swept or undeleted",
                "Try again: the decision does not change",
            )
        return is_swept

    return retry(once, StoreUnavailable, repeat(0.0, _TRIES - 1))


def _is_swept(run: Run, hidden: Hidden) -> bool | None:
    """Whether the sweep decision of a tombstone sweeps it; None if there is no decision. Raises Damaged."""
    key = run.keys.sweep_decision(hidden.attempt, hidden.id)
    try:
        decision = run.read(key, SweepDecision)
    except ObjectMissing:
        return None
    if (decision.attempt, decision.tombstone) != (str(hidden.attempt), hidden.id):
        raise CorruptObject(f"{run.store.object_url(key)} is the sweep decision of another tombstone")
    return decision.swept


def _has_outcome(run: Run, attempt: Attempt) -> bool:
    """Whether it has an outcome that counts, and not one that was created again after it was swept and forgotten."""
    return attempt in decided_attempts(run) and attempt not in DeletedAttempts(run)


def _is_left(run: Run, hidden: Hidden) -> bool:
    """Whether a tombstone still exists, asked after its sweep decision is known.

    A sweep decision expires. A process that slept for weeks may then decide differently on a tombstone that was removed
    long ago (docs/decisions/0027).
    """
    return run.store.find(hidden.key(run)) is not None


def _sweep_decisions(run: Run, hidden: Collection[Hidden]) -> tuple[dict[Hidden, bool], list[Damaged]]:
    """Whether decided tombstones are swept, and the errors of those whose sweep decision is damaged."""
    decided, damage = {}, []
    for one in hidden:
        try:
            if (is_swept := _is_swept(run, one)) is not None:
                decided[one] = is_swept
        except Damaged as error:
            damage.append(error)
    return decided, damage


def _is_due(run: Run, hidden: Hidden) -> bool:
    tombstone = run.read_intact(hidden.key(run), Tombstone)
    grace_s = tombstone.grace_s if tombstone is not None else SWEEP_GRACE_S
    return run.age_s(hidden.written_at) >= grace_s


def _present(run: Run, attempts: Collection[Attempt]) -> list[Attempt]:
    """The attempts that still have an outcome or data."""
    if not attempts:
        return []
    decided, folders = set(decided_attempts(run)), set(_attempts_with_data(run))
    return sorted(a for a in attempts if a in decided or (a in folders and has_data(run, a)))


def has_data(run: Run, attempt: Attempt) -> bool:
    """Whether an attempt has any object. SeaweedFS lists the empty folders of deleted objects."""
    return next(iter(run.store.list(run.keys.attempt(attempt))), None) is not None


def _delete(run: Run, attempts: Collection[Attempt]) -> int:
    """Delete labels, findings and outcome, then the data, of swept attempts that still have any. Then remove the marks
    of all these attempts.

    Returns the number of bytes freed.
    """
    freed = 0
    present = _present(run, attempts)
    listed = list(run.listed(run.keys.tombstones)) if present else ()
    for attempt in present:
        run.store.delete_many(
            [
                *(info.key for other, id, info in listed if other == attempt and is_thinning(id)),
                *(run.keys.labels_version(attempt, version) for version in label_versions(run).get(attempt, ())),
                run.keys.verified_record(attempt),
                run.keys.quarantine_record(attempt),
                run.keys.drill(attempt),
                run.keys.outcome(attempt),
            ]
        )
        freed += delete_data(run, attempt)
    if attempts:
        unmark(run, [found for found in marks(run) if found.by in attempts])
    return freed


def _listed(run: Run, prefix: str) -> list[Hidden]:
    """Those that are decided, or will be."""
    return [
        Hidden(attempt, id, info.modified_at)
        for attempt, id, info in run.listed(prefix)
        if id != THINNED and (is_ulid(id) or is_thinning(id))
    ]


ORPHAN_GRACE_S = 24 * 3600.0
"""An attempt without an outcome and without a lease is aborted when its newest object is this old."""


class CollectReport(Record):
    """The result of a collection for one run, by checkpoint id."""

    run: str
    swept: list[str]
    """Hidden before, and permanently deleted now."""
    rolled_forward: list[str]
    aborted: list[str]
    freed_bytes: int


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


def collect(run: Run, grace_s: float = ORPHAN_GRACE_S) -> CollectReport:
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
    # Processes that slept for weeks wrote these.
    freed = swept.freed_bytes + _delete(run, {a for a in decided.union(present) if a in hidden.deleted})
    for attempt in present:
        if attempt in hidden:
            continue
        if attempt not in decided and advance(run, attempt):
            rolled.append(run.id_of(attempt))
        elif attempt in outcomes and outcomes[attempt].committed is not None:
            continue
        elif _abort_if_old(run, attempt, grace_s):
            audit.record(run, Action.ABORT, [attempt], "an orphan")
            freed += delete_data(run, attempt)
            aborted.append(run.id_of(attempt))
    run.store.abort_uploads(run.keys.attempts, run.clock() - max(grace_s, ORPHAN_GRACE_S))
    run.store.delete_many(expired_leases(run))
    forget_tombstones(run)
    audit.forget_old(run)
    run.store.delete_many(old_heartbeats(run))
    _forget_marks(run)
    _forget_aborted(run, outcomes)
    return CollectReport(
        run=run.name,
        swept=list(map(run.id_of, swept.attempts)),
        rolled_forward=rolled,
        aborted=aborted,
        freed_bytes=freed,
    )


def advance(run: Run, attempt: Attempt) -> bool:
    """Commit an undecided attempt if all of its receipts exist, unless a newer generation has begun. True if it is now
    committed."""
    try:
        return roll_forward(run, attempt) is not None
    except (AttemptAborted, ReferenceLost, Superseded, Damaged, UnsupportedObject, ObjectMissing):
        return False  # an object is missing if another collector was faster


def undecided_attempts(run: Run) -> list[Attempt]:
    """Attempts that have data but no outcome, and are not hidden, oldest step first."""
    return undecided_and_decided(run)[0]


def undecided_and_decided(run: Run) -> tuple[list[Attempt], list[Attempt]]:
    """The undecided attempts, as above, and the decided ones, newest generation and step first.

    An attempt that was complete when this call began is in one of them, or hidden.
    """
    # In any order: an outcome created between the two is in one of them.
    present, decided = in_parallel(lambda listed: listed(run), (_attempts_with_data, decided_attempts))
    known = set(decided)
    left = [attempt for attempt in present if attempt not in known]
    hidden = hidden_attempts(run) if left else ()  # last: an outcome is not deleted before its tombstone exists
    return [attempt for attempt in left if attempt not in hidden], decided


def _attempts_with_data(run: Run) -> list[Attempt]:
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
        if _idle_s(run, run.objects(attempt)) < grace_s or attempt in active_leases(run):
            return False  # leased: the copy of a replicator, which will continue it
        outcome = decide(run, attempt, None)
    return outcome.committed is None


def _forget_marks(run: Run) -> None:
    """Remove marks of attempts without data: aborted, or swept by a process that crashed."""
    # Marks first: an attempt writes its receipts before its marks.
    listed = marks(run)
    if listed:
        present, decided = set(_attempts_with_data(run)), set(decided_attempts(run))
        left = {by for by in present.intersection(found.by for found in listed) if by in decided or has_data(run, by)}
        unmark(run, [found for found in listed if found.by not in left])


def _forget_aborted(run: Run, outcomes: Mapping[Attempt, Outcome]) -> None:
    """Remove aborted outcomes a week after the data is deleted. The list of deleted attempts names the attempts by
    then."""
    listed = run.listed(run.keys.commits)
    old = {attempt for attempt, _, info in listed if run.age_s(info.modified_at) > TOMBSTONE_KEPT_S}
    aborted = {attempt for attempt, outcome in outcomes.items() if outcome.committed is None}
    gone = [attempt for attempt in old & aborted if not has_data(run, attempt)]
    run.store.delete_many(run.keys.outcome(attempt) for attempt in sorted(record_deleted(run, gone)))


def _outcomes(run: Run, attempts: Iterable[Attempt]) -> dict[Attempt, Outcome]:
    """The outcomes of these attempts, without damaged ones. They never change, so each is read once per collection."""

    def read(attempt: Attempt) -> Outcome | None:
        try:
            return read_outcome(run, attempt)
        except Damaged:
            return None

    return {Attempt.parse(outcome.attempt): outcome for outcome in in_parallel(read, attempts) if outcome is not None}


UNDELETED = "undeleted"
"""The name of the pin that an undelete adds."""
_IDLE_S = 3600.0


class Waste(NamedTuple):
    """Bytes in the store that belong to a run but to none of its visible checkpoints."""

    orphans: int
    """Bytes of undecided attempts that were not written to for an hour."""
    tombstoned: int
    """Bytes of checkpoints that are hidden and not swept yet, and of optimizer state likewise."""


class Deleted(Record):
    """A checkpoint that is hidden, or thinned, and can be undeleted until `until`."""

    id: str
    by: str
    at: float
    reason: str
    until: float


def measure_waste(run: Run) -> Waste:
    """The bytes that a collection could free. Lists every such attempt; changes nothing."""
    undecided = (run.objects(attempt) for attempt in undecided_attempts(run))
    # Most hidden attempts have no data any more: their tombstones stay for a week.
    found = list_hidden(run)
    whole = {one.attempt for one in found if not one.thins}
    going = {one.attempt for one in found}.intersection(_attempts_with_data(run))
    return Waste(
        orphans=sum(info.bytes for objects in undecided if _idle_s(run, objects) > _IDLE_S for info in objects),
        tombstoned=sum(info.bytes for a in going for info in run.objects(a, optimizer=a not in whole)),
    )


def _idle_s(run: Run, objects: Iterable[ObjectInfo]) -> float:
    """Seconds since the last of these objects was written; less than any grace if there is none."""
    return run.age_s(max((info.modified_at for info in objects), default=inf))


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
        if isinstance(error, SweepBegun) or attempt not in visible_attempts(run):
            run.store.delete_many([run.keys.pin(attempt, UNDELETED)])
            raise
        # Another undelete was faster.
    return Reference(run.name, attempt.step, attempt.ulid)


def list_deleted(run: Run) -> list[Deleted]:
    """The hidden checkpoints of a run that still have their data, newest step first."""
    left = set(decided_attempts(run))
    decided = set(_listed(run, run.keys.sweep_decisions))
    found = []
    for hidden in reversed(list_hidden(run)):
        if hidden.attempt not in left or hidden in decided:
            continue
        known = run.read_intact(hidden.key(run), Tombstone)
        by, reason, grace_s = (known.by, known.reason, known.grace_s) if known else ("", "", SWEEP_GRACE_S)
        at, reason = hidden.written_at, f"thinned: {reason}" if hidden.thins else reason
        found.append(Deleted(id=run.id_of(hidden.attempt), by=by, at=at, reason=reason, until=at + grace_s))
    return found
