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
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.run import Run
from ckptstore.stores import ObjectInfo

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
    run: Run,
    attempts: Sequence[Attempt],
    reason: str,
    grace_s: float = SWEEP_GRACE_S,
    progress: Callable[[Attempt], None] = lambda _: None,
) -> Holds:
    """Phase 1: nobody sees these checkpoints any more; durable on return.

    Returns those that are held, and why: they are untouched, or, if the hold came in this very moment, back again.
    A call that fails has hidden some of them, and may be repeated.
    """
    held = dict(active_holds(run))
    if free := [attempt for attempt in attempts if attempt not in held]:
        audit.record(run, Action.DELETE, free, reason)
    hidden: dict[Attempt, str] = {}
    for attempt in attempts:
        if attempt not in held:
            hidden[attempt] = _write_tombstone(run, attempt, reason, grace_s)
        progress(attempt)
    late = active_holds(run) if hidden else {}
    for attempt in hidden.keys() & late.keys():
        if _cancel_deletion(run, attempt, [hidden[attempt]]):
            held[attempt] = late[attempt]
    return {attempt: held[attempt] for attempt in attempts if attempt in held}


def undelete(run: Run, attempt: Attempt, reason: str = "") -> None:
    """Take a deletion back: the checkpoint is listed again on return, as it was.

    Raises NoCheckpoint if it is not being deleted, or SweepBegun if its data is going or gone. A call that fails
    otherwise may be repeated.
    """
    ids = [hidden.id for hidden in list_hidden(run) if hidden.attempt == attempt]
    if not ids:
        raise NoCheckpoint(f"{run.id_of(attempt)} is not being deleted", "ckptctl deleted shows what is")
    audit.record(run, Action.UNDELETE, [attempt], reason)
    if not _cancel_deletion(run, attempt, ids):
        raise SweepBegun(f"{run.id_of(attempt)} was given up for good", "Its data is going or gone")


def sweep(run: Run, only: Collection[Attempt] | None = None) -> Swept:
    """Phase 2: delete what was hidden for its grace and is not held, and finish sweeps that crashed.

    Gone for good on return. Ages are differences between the store's times and `clock`, which must not be minutes
    apart (store_check.check_store). only: these attempts, at any age. Raises Unavailable: calling again goes on; or
    Damaged, after all others are done: a checkpoint with a damaged fate stays hidden and whole.
    """
    hidden = [h for h in list_hidden(run) if only is None or h.attempt in only]
    decided, damage = _fates(run, hidden)
    for one, fate in decided.items():
        if not fate.swept:  # whoever took it back died before the tombstone was gone
            run.store.delete_many([run.keys.tombstone(one.attempt, one.id)])
    due = [h for h in hidden if h not in decided and h not in damage and (only is not None or _is_due(run, h))]
    held = active_holds(run) if due else {}
    due = [h for h in due if h.attempt not in held]
    if due:
        audit.record(run, Action.SWEEP, dict.fromkeys(h.attempt for h in due), "")
    claimed = [h.attempt for h in due if _decide(run, h.attempt, h.id, swept=True).swept]
    to_delete = {*claimed, *(h.attempt for h, fate in decided.items() if fate.swept)}
    freed = sum(_delete(run, attempt) for attempt in _present(run, to_delete))
    if to_delete:
        unmark(run, [found for found in marks(run) if found.by in to_delete])
    for error in damage.values():
        raise error
    return Swept(tuple(dict.fromkeys(claimed)), freed)


def list_hidden(run: Run) -> list[Hidden]:
    """All tombstones of a run, by attempt."""
    return sorted(_parse(run.store.list(run.keys.tombstones)), key=lambda h: (h.attempt, h.id))


def find_hidden(run: Run, reference: Reference) -> Attempt:
    """The hidden attempt that a reference names; of several of one step the last one saved. Raises NoCheckpoint."""
    found = [
        h.attempt
        for h in list_hidden(run)
        if h.attempt.step == reference.step and reference.ulid in (None, h.attempt.ulid)
    ]
    if not found:
        raise NoCheckpoint(
            f"run {run.name!r} has no deleted checkpoint at step {reference.step}", "ckptctl deleted shows them"
        )
    return max(found)


def read_tombstone(run: Run, hidden: Hidden) -> Tombstone | None:
    """Who hid it, when and why; None if that cannot be read any more."""
    key = run.keys.tombstone(hidden.attempt, hidden.id)
    try:
        return parse_sealed(run.store.get(key), Tombstone, run.store.object_url(key))
    except (Damaged, ObjectMissing):
        return None


def forget_tombstones(run: Run) -> None:
    """Remove tombstones and fates that nobody can act on any more: a week after the data is gone."""
    cutoff = run.clock() - TOMBSTONE_KEPT_S
    old = {(f.attempt, f.id) for f in _parse(run.store.list(run.keys.fates)) if f.written_at < cutoff}
    hidden = [h for h in list_hidden(run) if (h.attempt, h.id) in old]
    busy = set(_present(run, {h.attempt for h in hidden}))
    for one in hidden:
        if one.attempt in busy:
            old.discard((one.attempt, one.id))
    keys = [run.keys.tombstone(h.attempt, h.id) for h in hidden if h.attempt not in busy]
    # Tombstones first: one without its fate could be decided anew.
    run.store.delete_many([*keys, *(run.keys.fate(attempt, id) for attempt, id in sorted(old))])


def delete_data(run: Run, attempt: Attempt) -> int:
    """Delete what an attempt wrote before its outcome. Returns bytes freed."""
    objects = list(run.store.list(run.keys.attempt(attempt)))
    # Receipts first: without them nobody can take the rest for a finished attempt.
    objects.sort(key=lambda info: names.receipt_rank(info.key) is None)
    run.store.delete_many(info.key for info in objects)
    return sum(info.bytes for info in objects)


def _write_tombstone(run: Run, attempt: Attempt, reason: str, grace_s: float) -> str:
    now = run.clock()
    id = new_ulid(now)
    tombstone = Tombstone(
        format=FORMAT, kind="tombstone", attempt=str(attempt), by=run.by, at=now, reason=reason, grace_s=grace_s
    )
    run.store.put(run.keys.tombstone(attempt, id), seal(tombstone))
    return id


def _cancel_deletion(run: Run, attempt: Attempt, ids: Sequence[str]) -> bool:
    """False if one of the tombstones is being swept."""
    if any(_decide(run, attempt, id, swept=False).swept for id in ids):
        return False
    run.store.delete_many(run.keys.tombstone(attempt, id) for id in ids)
    return True


def _decide(run: Run, attempt: Attempt, id: str, *, swept: bool) -> Fate:
    """Create the fate of a tombstone, or obey the one that is there. Durable on return."""
    proposal = Fate(
        format=FORMAT, kind="fate", attempt=str(attempt), tombstone=id, swept=swept, by=run.by, at=run.clock()
    )
    failure: StoreUnavailable | None = None
    for _ in range(_TRIES):
        try:
            if run.store.put_if_absent(run.keys.fate(attempt, id), seal(proposal)):
                return proposal
            # After a lost reply this is our own: what it says is what we wanted, and that is all that counts.
            fate = _read_fate(run, attempt, id)
        except StoreUnavailable as error:
            failure = error
            continue
        if fate is not None:
            return fate
    raise failure or StoreUnavailable(
        f"cannot learn the fate of {run.id_of(attempt)} in {run.store.url}",
        "Call again: it is decided once",
    )


def _read_fate(run: Run, attempt: Attempt, id: str) -> Fate | None:
    key = run.keys.fate(attempt, id)
    try:
        fate = parse_sealed(run.store.get(key), Fate, run.store.object_url(key))
    except ObjectMissing:
        return None
    if (fate.attempt, fate.tombstone) != (str(attempt), id):
        raise CorruptObject(f"{run.store.object_url(key)} is the fate of another tombstone")
    return fate


def _fates(run: Run, hidden: Collection[Hidden]) -> tuple[dict[Hidden, Fate], dict[Hidden, Damaged]]:
    """Those that are decided, and those whose fate cannot be read."""
    listed = {(f.attempt, f.id) for f in _parse(run.store.list(run.keys.fates))}
    decided: dict[Hidden, Fate] = {}
    damage: dict[Hidden, Damaged] = {}
    for one in hidden:
        if (one.attempt, one.id) in listed:
            try:
                fate = _read_fate(run, one.attempt, one.id)
            except Damaged as error:
                damage[one] = error
                continue
            if fate is not None:
                decided[one] = fate
    return decided, damage


def _is_due(run: Run, hidden: Hidden) -> bool:
    tombstone = read_tombstone(run, hidden)
    grace_s = tombstone.grace_s if tombstone is not None else SWEEP_GRACE_S
    return run.clock() - hidden.written_at >= grace_s


def _present(run: Run, attempts: Collection[Attempt]) -> list[Attempt]:
    """Those of which something is left to delete."""
    if not attempts:
        return []
    left = {str(attempt) for attempt in decided_attempts(run)}
    left |= set(run.store.list_folders(run.keys.attempts))
    return sorted(attempt for attempt in attempts if str(attempt) in left)


def _delete(run: Run, attempt: Attempt) -> int:
    """Delete the findings, the outcome, then the data, of an attempt that is given up. Returns bytes freed."""
    run.store.delete_many(
        [
            *(run.keys.labels_version(attempt, version) for version in label_versions(run).get(attempt, ())),
            run.keys.verified_record(attempt),
            run.keys.quarantine_record(attempt),
            run.keys.outcome(attempt),
        ]
    )
    return delete_data(run, attempt)


def _parse(listed: Iterable[ObjectInfo]) -> Iterator[Hidden]:
    for info in listed:
        try:
            attempt, id = names.attempt_and_name(info.key)
            yield Hidden(attempt, names.check_ulid(id), info.modified_at)
        except InvalidName:
            continue  # not ours
