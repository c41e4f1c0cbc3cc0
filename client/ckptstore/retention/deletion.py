"""Pruning runs and collecting orphans, so that a crash at any point leaves a legal state.

A prune hides what its policy does not keep (tombstones.py); a collection sweeps what was hidden for its grace.
An orphan (an attempt that was never decided) is first decided as aborted, then deleted.
Deletes are idempotent; whoever finds half of one finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits import audit
from ckptstore.commits.catalog import Checkpoint, decided_attempts, hidden_attempts, list_checkpoints
from ckptstore.commits.commit import decide, identity, read_outcome, roll_forward
from ckptstore.commits.labels import with_labels
from ckptstore.commits.leases import expired_leases
from ckptstore.commits.references import marks, unmark
from ckptstore.errors import (
    AttemptAborted,
    CheckpointHeld,
    Damaged,
    InvalidName,
    ObjectMissing,
    ReferenceLost,
    SweepBegun,
    TooMuchToDelete,
)
from ckptstore.format.records import Action
from ckptstore.names import Attempt, Reference, checkpoint_id
from ckptstore.retention.pins import active_holds, hold
from ckptstore.retention.policy import Policy, Verdict, judge
from ckptstore.retention.scrubbing import last_verified
from ckptstore.retention.tombstones import (
    SWEEP_GRACE_S,
    TOMBSTONE_KEPT_S,
    delete_data,
    find_hidden,
    forget_tombstones,
    hide,
    list_hidden,
    read_tombstone,
    sweep,
    undelete,
)
from ckptstore.stores import Store

ORPHAN_GRACE_S = 24 * 3600.0
"""An attempt without an outcome is left alone until its newest object is this old."""
MAX_DELETE_FRACTION = 0.9
"""A prune that nobody has looked at removes at most so much of a run at once."""


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune of one run would do."""

    run: str
    verdicts: tuple[Verdict, ...]

    @property
    def keep(self) -> list[Verdict]:
        """Those with a reason to stay."""
        return [verdict for verdict in self.verdicts if verdict.reasons]

    @property
    def remove(self) -> list[Checkpoint]:
        """Those without."""
        return [verdict.checkpoint for verdict in self.verdicts if not verdict.reasons]

    def check_fraction(self, allowed: float = MAX_DELETE_FRACTION) -> None:
        """TooMuchToDelete if the plan removes a larger part of the run's checkpoints than `allowed`."""
        share = len(self.remove) / max(1, len(self.verdicts))
        if share > allowed:
            raise TooMuchToDelete(
                f"{len(self.remove)} of the {len(self.verdicts)} checkpoints of run {self.run!r} would go: "
                f"{share:.0%}, and {allowed:.0%} are allowed",
                "Look at the plan (--dry-run), then force it if it is meant",
            )


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection did to one run."""

    swept: tuple[Attempt, ...]
    """Hidden before, gone for good now."""
    rolled_forward: tuple[Attempt, ...]
    aborted: tuple[Attempt, ...]
    freed_bytes: int


def plan_prune(store: Store, run: str, policy: Policy, clock: Clock) -> PrunePlan:
    """What would go and what would stay, and why. Deletes nothing."""
    checkpoints = with_labels(store, run, list_checkpoints(store, run))
    verified = last_verified(store, run, checkpoints)
    # Holds last: what is taken while we look at the rest is seen.
    verdicts = judge(policy, checkpoints, active_holds(store, run, clock), clock(), verified)
    return PrunePlan(run, tuple(verdicts))


def apply_prune(
    store: Store,
    plan: PrunePlan,
    clock: Clock,
    progress: Callable[[Checkpoint], None] = lambda _: None,
    grace_s: float = 0.0,
    by: str = "",
    reason: str = "prune",
) -> list[Checkpoint]:
    """Hide what the plan removes, for good after the grace; durable on return. Without a grace it is gone on return.

    Returns those that were spared because something held them by now. by: who wanted it, for the audit log; empty:
    this process. Raises Unavailable: part of it may be done then, and a new plan goes on.
    """
    remove = {checkpoint.attempt: checkpoint for checkpoint in plan.remove}
    if not remove:
        return []
    by = by or identity()
    held = hide(store, plan.run, [*remove], reason, by, clock, grace_s, lambda attempt: progress(remove[attempt]))
    if not grace_s:
        sweep(store, plan.run, clock, by, only=remove.keys() - held.keys())
    return [remove[attempt] for attempt in held]


def delete_checkpoint(
    store: Store, checkpoint: Checkpoint, reason: str, clock: Clock, grace_s: float = 0.0, by: str = ""
) -> None:
    """Delete one checkpoint, whatever its policy says: hidden on return, and with a grace of 0 gone for good.

    Raises CheckpointHeld if something holds it; nothing has changed then.
    """
    run, attempt = checkpoint.run, checkpoint.attempt
    by = by or identity()
    held = hide(store, run, [attempt], reason, by, clock, grace_s)
    if held:
        raise CheckpointHeld(
            f"{checkpoint.id} is held by {', '.join(held[attempt])}",
            "Try again when it is released; unpin it; delete first what references its chunks",
        )
    if not grace_s:
        sweep(store, run, clock, by, only=[attempt])


def collect(store: Store, run: str, clock: Clock, grace_s: float = ORPHAN_GRACE_S, by: str = "") -> Collected:
    """Sweep what is due, and finish what crashes left: half deletions, finished but uncommitted attempts, orphans.

    grace_s: how long nothing was written to an orphan. Ages are differences between the store's own times and
    `clock`, which must not be minutes apart (probing.check_store).
    """
    by = by or identity()
    swept = sweep(store, run, clock, by)
    freed = swept.freed_bytes
    hidden = set(hidden_attempts(store, run))
    rolled, aborted = [], []
    decided = set(decided_attempts(store, run))
    for attempt in _attempts_with_data(store, run):
        if attempt in hidden:
            continue
        if attempt not in decided and advance(store, run, attempt, clock):
            rolled.append(attempt)
        elif _abort_if_old(store, run, attempt, clock, grace_s):
            audit.record(store, run, Action.ABORT, [attempt], by, "an orphan", clock)
            freed += delete_data(store, run, attempt)
            aborted.append(attempt)
    store.abort_uploads(names.attempts_prefix(run), clock() - max(grace_s, ORPHAN_GRACE_S))
    _forget(store, run, clock)
    return Collected(swept.attempts, tuple(rolled), tuple(aborted), freed)


def advance(store: Store, run: str, attempt: Attempt, clock: Clock) -> bool:
    """Commit an undecided attempt if all of its receipts are there. True if it is now committed."""
    try:
        return roll_forward(store, run, attempt, clock) is not None
    except (AttemptAborted, ReferenceLost, Damaged, ObjectMissing):  # missing: another collector was faster
        return False


def undecided_attempts(store: Store, run: str) -> list[Attempt]:
    """Attempts that wrote something and have neither an outcome nor a tombstone, by rising step."""
    present = _attempts_with_data(store, run)
    known = {*decided_attempts(store, run), *hidden_attempts(store, run)}
    return [attempt for attempt in present if attempt not in known]


def _attempts_with_data(store: Store, run: str) -> Sequence[Attempt]:
    found = []
    for name in store.list_folders(names.attempts_prefix(run)):
        try:
            found.append(Attempt.parse(name))
        except InvalidName:
            continue
    return found


def _abort_if_old(store: Store, run: str, attempt: Attempt, clock: Clock, grace_s: float) -> bool:
    """True if the attempt is decided as aborted, by us now or by anybody before."""
    try:
        outcome = read_outcome(store, run, attempt)
    except Damaged:
        return False
    if outcome is None:
        newest = max((info.modified_at for info in store.list(names.attempt_prefix(run, attempt))), default=None)
        if newest is None or clock() - newest < grace_s:
            return False
        outcome = decide(store, run, attempt, None, clock)
    return outcome.committed is None


def _forget(store: Store, run: str, clock: Clock) -> None:
    """Remove expired leases, old records, and what no committer and no deleter can contradict any more."""
    store.delete_many(expired_leases(store, run, clock))
    forget_tombstones(store, run, clock)
    audit.forget_old(store, run, clock)
    _forget_marks(store, run)
    cutoff = clock() - TOMBSTONE_KEPT_S
    for info in list(store.list(names.commits_prefix(run))):
        if info.modified_at < cutoff:
            _forget_aborted(store, run, info.key)


def _forget_marks(store: Store, run: str) -> None:
    """Remove marks of attempts that are gone: given up, or swept by somebody who crashed."""
    # Marks first: an attempt that marks something has written its receipts before.
    listed = marks(store, run)
    if listed:
        present = set(_attempts_with_data(store, run))
        unmark(store, run, [found for found in listed if found.by not in present])


def _forget_aborted(store: Store, run: str, key: str) -> None:
    try:
        attempt = Attempt.parse(key.rsplit("/", 1)[-1].removesuffix(".json"))
        outcome = read_outcome(store, run, attempt)
    except (InvalidName, Damaged):
        return
    if outcome is not None and outcome.committed is None:
        store.delete_many([key])


UNDELETED = "undeleted"
"""The pin of what was taken back."""
_IDLE_S = 3600.0


@dataclass(frozen=True, slots=True)
class Waste:
    """Bytes that a run takes in the store beside its checkpoints."""

    orphans: int
    """Of attempts that were never decided, and to which nothing was written for an hour."""
    tombstoned: int
    """Of checkpoints that are hidden and not swept yet."""


class Deleted(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is hidden and can be taken back until `until`."""

    id: str
    by: str
    at: float
    reason: str
    until: float


def measure_waste(store: Store, run: str, clock: Clock) -> Waste:
    """What could be freed: lists each such attempt. Changes nothing."""
    cutoff = clock() - _IDLE_S
    undecided = (_extent(store, run, attempt) for attempt in undecided_attempts(store, run))
    hidden = {found.attempt for found in list_hidden(store, run)}
    return Waste(
        orphans=sum(num_bytes for num_bytes, newest in undecided if newest < cutoff),
        tombstoned=sum(_extent(store, run, attempt)[0] for attempt in hidden),
    )


def _extent(store: Store, run: str, attempt: Attempt) -> tuple[int, float]:
    """Bytes of an attempt, and when it was last written to."""
    objects = list(store.list(names.attempt_prefix(run, attempt)))
    return sum(info.bytes for info in objects), max((info.modified_at for info in objects), default=0.0)


def take_back(store: Store, reference: Reference, by: str, clock: Clock, reason: str = "") -> Reference:
    """Take a deletion back for good: the checkpoint is listed and pinned on return. Returns its full name.

    Without the pin, the policy that deleted it would do so again at once. A call that fails may be repeated.
    Raises NoCheckpoint or SweepBegun: nothing is pinned then.
    """
    run, attempt = reference.run, find_hidden(store, reference)
    # The pin first: nobody finds the checkpoint without it.
    hold(store, run, attempt, UNDELETED, by, clock)
    try:
        undelete(store, run, attempt, by, clock, reason)
    except SweepBegun:
        store.delete_many([names.pin_key(run, attempt, UNDELETED)])
        raise
    return Reference(run, attempt.step, attempt.ulid)


def list_deleted(store: Store, run: str) -> list[Deleted]:
    """The hidden checkpoints of a run whose data is still there, by falling step."""
    left = set(decided_attempts(store, run))
    swept = {names.attempt_and_name(info.key) for info in store.list(names.fates_prefix(run))}
    found = []
    for hidden in reversed(list_hidden(store, run)):
        if hidden.attempt not in left or (hidden.attempt, hidden.id) in swept:
            continue
        tombstone = read_tombstone(store, run, hidden)
        found.append(
            Deleted(
                id=checkpoint_id(run, hidden.attempt),
                by=tombstone.by if tombstone else "",
                at=hidden.written_at,
                reason=tombstone.reason if tombstone else "",
                until=hidden.written_at + (tombstone.grace_s if tombstone else SWEEP_GRACE_S),
            )
        )
    return found
