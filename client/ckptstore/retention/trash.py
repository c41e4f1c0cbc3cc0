"""What lies in the store and is no checkpoint: what is deleted and can still be taken back, and orphans."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore import names
from ckptstore.catalog import decided_attempts
from ckptstore.clock import Clock
from ckptstore.daemon.wire import DeletedBody
from ckptstore.errors import SweepBegun
from ckptstore.names import Attempt, Reference, checkpoint_id
from ckptstore.retention.deletion import undecided_attempts
from ckptstore.retention.pins import hold
from ckptstore.retention.tombstones import SWEEP_GRACE_S, find_hidden, list_hidden, read_tombstone, undelete
from ckptstore.stores import Store

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


def list_deleted(store: Store, run: str) -> list[DeletedBody]:
    """The hidden checkpoints of a run whose data is still there, by falling step."""
    left = set(decided_attempts(store, run))
    swept = {names.attempt_and_name(info.key) for info in store.list(names.fates_prefix(run))}
    found = []
    for hidden in reversed(list_hidden(store, run)):
        if hidden.attempt not in left or (hidden.attempt, hidden.id) in swept:
            continue
        tombstone = read_tombstone(store, run, hidden)
        found.append(
            DeletedBody(
                id=checkpoint_id(run, hidden.attempt),
                by=tombstone.by if tombstone else "",
                at=hidden.written_at,
                reason=tombstone.reason if tombstone else "",
                until=hidden.written_at + (tombstone.grace_s if tombstone else SWEEP_GRACE_S),
            )
        )
    return found
