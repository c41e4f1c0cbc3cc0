"""Deleting one checkpoint in two phases: hide it, and after a grace sweep it, unless somebody takes it back.

Every deletion writes a tombstone of its own. A create-only object, its fate, decides once and for all whether that
tombstone is swept or taken back, so that an undelete and a sweep never both win. A checkpoint is hidden
while any tombstone of it is there, and a tombstone goes only after its fate says that it was taken back, or a week
after the data. docs/decisions/0012 has the sequences that this rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits import audit
from ckptstore.commits.catalog import decided_attempts
from ckptstore.commits.labels import label_versions
from ckptstore.commits.references import marks, unmark
from ckptstore.errors import (
    CorruptObject,
    Damaged,
    InvalidName,
    NoCheckpoint,
    ObjectMissing,
    StoreUnavailable,
    SweepBegun,
)
from ckptstore.format.documents import FORMAT, Tombstone
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import Action, Fate
from ckptstore.names import Attempt, Reference, checkpoint_id, new_ulid
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.stores import ObjectInfo, Store

SWEEP_GRACE_S = 24 * 3600.0
"""A deletion can be taken back for so long, unless it says otherwise."""
TOMBSTONE_KEPT_S = 7 * 24 * 3600.0
"""Tombstones, fates and aborted outcomes outlive any process that could still act on what it read before."""

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Hidden:
    """One tombstone, as a listing tells it."""

    attempt: Attempt
    id: str
    written_at: float
    """By the store's clock."""


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did to one run."""

    attempts: tuple[Attempt, ...]
    """Decided now; their data is gone."""
    freed_bytes: int


def hide(
    store: Store,
    run: str,
    attempts: Sequence[Attempt],
    reason: str,
    by: str,
    clock: Clock,
    grace_s: float = SWEEP_GRACE_S,
    progress: Callable[[Attempt], None] = lambda _: None,
) -> Holds:
    """Phase 1: nobody sees these checkpoints any more; durable on return.

    Returns those that are held, and why: they are untouched, or, if the hold came in this very moment, back again.
    A call that fails has hidden some of them, and may be repeated.
    """
    held = dict(active_holds(store, run, clock))
    if free := [attempt for attempt in attempts if attempt not in held]:
        audit.record(store, run, Action.DELETE, free, by, reason, clock)
    hidden: dict[Attempt, str] = {}
    for attempt in attempts:
        if attempt not in held:
            hidden[attempt] = _bury(store, run, attempt, reason, by, clock, grace_s)
        progress(attempt)
    late = active_holds(store, run, clock) if hidden else {}
    for attempt in hidden.keys() & late.keys():
        if _take_back(store, run, attempt, [hidden[attempt]], by, clock):
            held[attempt] = late[attempt]
    return {attempt: held[attempt] for attempt in attempts if attempt in held}


def undelete(store: Store, run: str, attempt: Attempt, by: str, clock: Clock, reason: str = "") -> None:
    """Take a deletion back: the checkpoint is listed again on return, as it was.

    Raises NoCheckpoint if it is not being deleted, or SweepBegun if its data is going or gone. A call that fails
    otherwise may be repeated.
    """
    ids = [hidden.id for hidden in list_hidden(store, run) if hidden.attempt == attempt]
    if not ids:
        raise NoCheckpoint(f"{checkpoint_id(run, attempt)} is not being deleted", "ckptctl deleted shows what is")
    audit.record(store, run, Action.UNDELETE, [attempt], by, reason, clock)
    if not _take_back(store, run, attempt, ids, by, clock):
        raise SweepBegun(f"{checkpoint_id(run, attempt)} was given up for good", "Its data is going or gone")


def sweep(store: Store, run: str, clock: Clock, by: str, only: Collection[Attempt] | None = None) -> Swept:
    """Phase 2: delete what was hidden for its grace and is not held, and finish sweeps that crashed.

    Gone for good on return. Ages are differences between the store's times and `clock`, which must not be minutes
    apart (probing.check_store). only: these attempts, and at any age. Raises Unavailable: calling again goes on. Or,
    when all others are done, Damaged: what has a damaged fate stays hidden and whole.
    """
    hidden = [h for h in list_hidden(store, run) if only is None or h.attempt in only]
    decided, damage = _fates(store, run, hidden)
    for one, fate in decided.items():
        if not fate.swept:  # whoever took it back died before the tombstone was gone
            store.delete_many([names.tombstone_key(run, one.attempt, one.id)])
    due = [
        h
        for h in hidden
        if h not in decided and h not in damage and (only is not None or _is_due(store, run, h, clock))
    ]
    held = active_holds(store, run, clock) if due else {}
    due = [h for h in due if h.attempt not in held]
    if due:
        audit.record(store, run, Action.SWEEP, dict.fromkeys(h.attempt for h in due), by, "", clock)
    claimed = [h.attempt for h in due if _decide(store, run, h.attempt, h.id, True, by, clock).swept]
    doomed = {*claimed, *(h.attempt for h, fate in decided.items() if fate.swept)}
    freed = sum(_delete(store, run, attempt) for attempt in _present(store, run, doomed))
    if doomed:
        unmark(store, run, [found for found in marks(store, run) if found.by in doomed])
    for error in damage.values():
        raise error
    return Swept(tuple(dict.fromkeys(claimed)), freed)


def list_hidden(store: Store, run: str) -> list[Hidden]:
    """All tombstones of a run, by attempt."""
    return sorted(_parse(store.list(names.tombstones_prefix(run))), key=lambda h: (h.attempt, h.id))


def find_hidden(store: Store, reference: Reference) -> Attempt:
    """The hidden attempt that a reference names; of several of one step the last one saved. Raises NoCheckpoint."""
    found = [
        h.attempt
        for h in list_hidden(store, reference.run)
        if h.attempt.step == reference.step and reference.ulid in (None, h.attempt.ulid)
    ]
    if not found:
        raise NoCheckpoint(
            f"run {reference.run!r} has no deleted checkpoint at step {reference.step}", "ckptctl deleted shows them"
        )
    return max(found)


def read_tombstone(store: Store, run: str, hidden: Hidden) -> Tombstone | None:
    """Who hid it, when and why; None if that cannot be read any more."""
    key = names.tombstone_key(run, hidden.attempt, hidden.id)
    try:
        return parse_sealed(store.get(key), Tombstone, store.object_url(key))
    except (Damaged, ObjectMissing):
        return None


def forget_tombstones(store: Store, run: str, clock: Clock) -> None:
    """Remove tombstones and fates that nobody can act on any more: a week after the data is gone."""
    cutoff = clock() - TOMBSTONE_KEPT_S
    old = {(f.attempt, f.id) for f in _parse(store.list(names.fates_prefix(run))) if f.written_at < cutoff}
    hidden = [h for h in list_hidden(store, run) if (h.attempt, h.id) in old]
    busy = set(_present(store, run, {h.attempt for h in hidden}))
    for one in hidden:
        if one.attempt in busy:
            old.discard((one.attempt, one.id))
    keys = [names.tombstone_key(run, h.attempt, h.id) for h in hidden if h.attempt not in busy]
    # Tombstones first: one without its fate could be decided anew.
    store.delete_many([*keys, *(names.fate_key(run, attempt, id) for attempt, id in sorted(old))])


def delete_data(store: Store, run: str, attempt: Attempt) -> int:
    """Delete what an attempt wrote before its outcome. Returns bytes freed."""
    objects = list(store.list(names.attempt_prefix(run, attempt)))
    # Receipts first: without them nobody can take the rest for a finished attempt.
    objects.sort(key=lambda info: names.receipt_rank(info.key) is None)
    store.delete_many(info.key for info in objects)
    return sum(info.bytes for info in objects)


def _bury(store: Store, run: str, attempt: Attempt, reason: str, by: str, clock: Clock, grace_s: float) -> str:
    now = clock()
    id = new_ulid(now)
    tombstone = Tombstone(
        format=FORMAT, kind="tombstone", attempt=str(attempt), by=by, at=now, reason=reason, grace_s=grace_s
    )
    store.put(names.tombstone_key(run, attempt, id), seal(tombstone))
    return id


def _take_back(store: Store, run: str, attempt: Attempt, ids: Sequence[str], by: str, clock: Clock) -> bool:
    """False if one of the tombstones is being swept."""
    if any(_decide(store, run, attempt, id, False, by, clock).swept for id in ids):
        return False
    store.delete_many(names.tombstone_key(run, attempt, id) for id in ids)
    return True


def _decide(store: Store, run: str, attempt: Attempt, id: str, swept: bool, by: str, clock: Clock) -> Fate:
    """Create the fate of a tombstone, or obey the one that is there. Durable on return."""
    proposal = Fate(format=FORMAT, kind="fate", attempt=str(attempt), tombstone=id, swept=swept, by=by, at=clock())
    failure: StoreUnavailable | None = None
    for _ in range(_TRIES):
        try:
            if store.put_if_absent(names.fate_key(run, attempt, id), seal(proposal)):
                return proposal
            # After a lost reply this is our own: what it says is what we wanted, and that is all that counts.
            fate = _read_fate(store, run, attempt, id)
        except StoreUnavailable as error:
            failure = error
            continue
        if fate is not None:
            return fate
    raise failure or StoreUnavailable(
        f"cannot learn the fate of {checkpoint_id(run, attempt)} in {store.url}", "Call again: it is decided once"
    )


def _read_fate(store: Store, run: str, attempt: Attempt, id: str) -> Fate | None:
    key = names.fate_key(run, attempt, id)
    try:
        fate = parse_sealed(store.get(key), Fate, store.object_url(key))
    except ObjectMissing:
        return None
    if (fate.attempt, fate.tombstone) != (str(attempt), id):
        raise CorruptObject(f"{store.object_url(key)} is the fate of another tombstone")
    return fate


def _fates(store: Store, run: str, hidden: Collection[Hidden]) -> tuple[dict[Hidden, Fate], dict[Hidden, Damaged]]:
    """Those that are decided, and those whose fate cannot be read."""
    listed = {(f.attempt, f.id) for f in _parse(store.list(names.fates_prefix(run)))}
    decided: dict[Hidden, Fate] = {}
    damage: dict[Hidden, Damaged] = {}
    for one in hidden:
        if (one.attempt, one.id) in listed:
            try:
                fate = _read_fate(store, run, one.attempt, one.id)
            except Damaged as error:
                damage[one] = error
                continue
            if fate is not None:
                decided[one] = fate
    return decided, damage


def _is_due(store: Store, run: str, hidden: Hidden, clock: Clock) -> bool:
    tombstone = read_tombstone(store, run, hidden)
    grace_s = tombstone.grace_s if tombstone is not None else SWEEP_GRACE_S
    return clock() - hidden.written_at >= grace_s


def _present(store: Store, run: str, attempts: Collection[Attempt]) -> list[Attempt]:
    """Those of which something is left to delete."""
    if not attempts:
        return []
    left = {str(attempt) for attempt in decided_attempts(store, run)}
    left |= set(store.list_folders(names.attempts_prefix(run)))
    return sorted(attempt for attempt in attempts if str(attempt) in left)


def _delete(store: Store, run: str, attempt: Attempt) -> int:
    """Delete the findings, the outcome, then the data, of an attempt that is given up. Returns bytes freed."""
    store.delete_many(
        [
            *(names.labels_key(run, attempt, version) for version in label_versions(store, run).get(attempt, ())),
            names.verified_key(run, attempt),
            names.quarantine_key(run, attempt),
            names.outcome_key(run, attempt),
        ]
    )
    return delete_data(store, run, attempt)


def _parse(listed: Iterable[ObjectInfo]) -> Iterator[Hidden]:
    for info in listed:
        try:
            attempt, id = names.attempt_and_name(info.key)
            yield Hidden(attempt, names.check_ulid(id), info.modified_at)
        except InvalidName:
            continue  # not ours
