"""Deleting checkpoints and collecting orphans, so that a crash at any point leaves a legal state.

A deletion: tombstone (hides it at once), outcome, data. The tombstone stays for a while after
the data: a slow committer that comes back to life then commits something nobody sees.
An orphan (an attempt that was never decided) is first decided as aborted, then deleted.
Deletes are idempotent; whoever finds half of one finishes it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ckptstore import names
from ckptstore.catalog import Checkpoint, decided_attempts, hidden_attempts, list_checkpoints
from ckptstore.clock import Clock
from ckptstore.commit import decide, identity, read_outcome, roll_forward
from ckptstore.documents import FORMAT, Tombstone, seal
from ckptstore.errors import AttemptAborted, CheckpointHeld, Damaged, InvalidName, ObjectMissing
from ckptstore.leases import active_leases, expired_leases
from ckptstore.names import Attempt
from ckptstore.retention import Policy, Verdict, judge
from ckptstore.stores import Store

ORPHAN_GRACE_S = 24 * 3600.0
"""An attempt without an outcome is left alone until its newest object is this old."""
TOMBSTONE_KEPT_S = 7 * 24 * 3600.0
"""Tombstones and aborted outcomes outlive any committer that could still be on its way."""


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


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection of orphans did to one run."""

    rolled_forward: tuple[Attempt, ...]
    aborted: tuple[Attempt, ...]
    freed_bytes: int


def plan_prune(store: Store, run: str, policy: Policy, clock: Clock) -> PrunePlan:
    """What would go and what would stay, and why. Deletes nothing."""
    verdicts = judge(policy, list_checkpoints(store, run), active_leases(store, run, clock))
    return PrunePlan(run, tuple(verdicts))


def apply_prune(
    store: Store, plan: PrunePlan, clock: Clock, progress: Callable[[Checkpoint], None] = lambda _: None
) -> list[Checkpoint]:
    """Delete what the plan removes. Returns those that were spared because a reader came in between."""
    spared = []
    for checkpoint in plan.remove:
        try:
            delete_checkpoint(store, checkpoint, "prune", clock)
        except CheckpointHeld:
            spared.append(checkpoint)
        progress(checkpoint)
    return spared


def delete_checkpoint(store: Store, checkpoint: Checkpoint, reason: str, clock: Clock) -> None:
    """Hide and delete one checkpoint; gone for good on return.

    Raises CheckpointHeld if it is leased. Nothing has happened then, unless the reader came in this very
    moment: the checkpoint is hidden, stays readable while the lease lasts, and is collected after it.
    """
    run, attempt = checkpoint.run, checkpoint.attempt
    _check_not_held(store, checkpoint, clock)
    tombstone = Tombstone(
        format=FORMAT, kind="tombstone", attempt=str(attempt), by=identity(), at=clock(), reason=reason
    )
    store.put(names.tombstone_key(run, attempt), seal(tombstone))
    # A tombstone is never taken back: somebody else may be deleting behind it already.
    _check_not_held(store, checkpoint, clock)
    _sweep(store, run, attempt)


def _check_not_held(store: Store, checkpoint: Checkpoint, clock: Clock) -> None:
    holders = active_leases(store, checkpoint.run, clock).get(checkpoint.attempt)
    if holders:
        raise CheckpointHeld(f"{checkpoint.id} is being read by {', '.join(holders)}", "Try again later")


def collect(store: Store, run: str, clock: Clock, grace_s: float = ORPHAN_GRACE_S) -> Collected:
    """Finish what crashes left: half deletions, finished but uncommitted attempts, orphans older than `grace_s`.

    Ages are differences between the store's own times and `clock`, which must not be minutes apart.
    """
    freed = 0
    hidden = set(hidden_attempts(store, run))
    held = active_leases(store, run, clock)
    for attempt in hidden - held.keys():
        freed += _sweep(store, run, attempt)
    rolled, aborted = [], []
    decided = set(decided_attempts(store, run))
    for attempt in _attempts_with_data(store, run):
        if attempt in hidden:
            continue
        if attempt not in decided and advance(store, run, attempt, clock):
            rolled.append(attempt)
        elif _abort_if_old(store, run, attempt, clock, grace_s):
            freed += _delete_data(store, run, attempt)
            aborted.append(attempt)
    _forget(store, run, clock, held)
    return Collected(tuple(rolled), tuple(aborted), freed)


def advance(store: Store, run: str, attempt: Attempt, clock: Clock) -> bool:
    """Commit an undecided attempt if all of its receipts are there. True if it is now committed."""
    try:
        return roll_forward(store, run, attempt, clock) is not None
    except (AttemptAborted, Damaged, ObjectMissing):  # missing: another collector was faster
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


def _sweep(store: Store, run: str, attempt: Attempt) -> int:
    """Delete the outcome, then the data, of an attempt whose tombstone is there. Returns bytes freed."""
    store.delete_many([names.outcome_key(run, attempt)])
    return _delete_data(store, run, attempt)


def _delete_data(store: Store, run: str, attempt: Attempt) -> int:
    objects = list(store.list(names.attempt_prefix(run, attempt)))
    # Receipts first: without them nobody can take the rest for a finished attempt.
    objects.sort(key=lambda info: names.receipt_rank(info.key) is None)
    store.delete_many(info.key for info in objects)
    return sum(info.bytes for info in objects)


def _forget(store: Store, run: str, clock: Clock, held: Collection[Attempt]) -> None:
    """Remove expired leases, and tombstones and aborted outcomes that no committer can contradict any more."""
    store.delete_many(expired_leases(store, run, clock))
    cutoff = clock() - TOMBSTONE_KEPT_S
    spared = {names.tombstone_key(run, attempt) for attempt in held}
    tombstones = list(store.list(names.tombstones_prefix(run)))
    store.delete_many(info.key for info in tombstones if info.modified_at < cutoff and info.key not in spared)
    for info in list(store.list(names.commits_prefix(run))):
        if info.modified_at < cutoff:
            _forget_aborted(store, run, info.key)


def _forget_aborted(store: Store, run: str, key: str) -> None:
    try:
        attempt = Attempt.parse(key.rsplit("/", 1)[-1].removesuffix(".json"))
        outcome = read_outcome(store, run, attempt)
    except (InvalidName, Damaged):
        return
    if outcome is not None and outcome.committed is None:
        store.delete_many([key])
