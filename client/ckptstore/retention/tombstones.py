"""Two-phase deletion: hide a checkpoint, and after a grace sweep it, unless it is undeleted.

Every deletion writes its own tombstone. A create-only object, the fate of the tombstone, decides whether the tombstone
is swept or undeleted, so that an undelete and a sweep never both win. A checkpoint is hidden while it has any
tombstone. A tombstone is removed only after its fate is "undeleted", or a week after the data is deleted, when the
attempt is on the list of the dead (commits/hidden.py). docs/decisions/0012 has the sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckptstore import names
from ckptstore.commits import audit
from ckptstore.commits.catalog import decided_attempts
from ckptstore.commits.hidden import Dead, bury
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
from ckptstore.format.documents import Tombstone, oldest_format
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import Action, Fate
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.retention.pins import Holds, active_holds
from ckptstore.run import Run
from ckptstore.stores import ObjectInfo

SWEEP_GRACE_S = 24 * 3600.0
"""Default time for which a deletion can be undone."""
TOMBSTONE_KEPT_S = 7 * 24 * 3600.0
"""Tombstones, fates and aborted outcomes are kept so long. Then the list of the dead replaces them."""

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Hidden:
    """One tombstone in a listing."""

    attempt: Attempt
    id: str
    written_at: float
    """By the store's clock."""


@dataclass(frozen=True, slots=True)
class Swept:
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
) -> Holds:
    """Phase 1: remove these checkpoints from listings; durable on return.

    Returns the held ones, and why: they were not hidden, or were listed again because a hold was taken concurrently.
    A call that fails may have hidden some of them, and may be repeated.
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
    """Undo a deletion: the checkpoint is listed again on return, unchanged.

    Raises NoCheckpoint if it is not being deleted, or SweepBegun if its data is deleted or being deleted. A call that
    fails with another error may be repeated.
    """
    ids = [hidden.id for hidden in list_hidden(run) if hidden.attempt == attempt]
    if not ids:
        raise NoCheckpoint(f"{run.id_of(attempt)} is not being deleted", "ckptctl undelete lists what is")
    audit.record(run, Action.UNDELETE, [attempt], reason)
    # A tombstone with a long grace may be left when the one that was swept is forgotten.
    if not _has_outcome(run, attempt) or not _cancel_deletion(run, attempt, ids):
        raise SweepBegun(
            f"{run.id_of(attempt)} can no longer be undeleted: its data is deleted or being deleted",
            "Use another checkpoint",
        )


def sweep(run: Run, only: Collection[Attempt] | None = None) -> Swept:
    """Phase 2: delete checkpoints whose grace is over and that are not held, and finish sweeps that crashed.

    Their data is deleted on return. Ages are differences between the store's times and `run.clock`, which must not be
    minutes apart (checks.check_store). only: these attempts, at any age. Raises Unavailable: another call
    continues; or Damaged after all others are done: a checkpoint with a damaged fate stays hidden and keeps its data.
    """
    hidden = [h for h in list_hidden(run) if only is None or h.attempt in only]
    listed = list_fates(run)
    # Most deletions of the last week are complete. Their fates and tombstones are not read again and again.
    left = set(_present(run, {h.attempt for h in hidden if (h.attempt, h.id) in listed}))
    decided, damage = _fates(run, [h for h in hidden if (h.attempt, h.id) in listed and h.attempt in left])
    for one, fate in decided.items():
        if not fate.swept:  # the undelete died before it removed the tombstone
            run.store.delete_many([run.keys.tombstone(one.attempt, one.id)])
    due = [h for h in hidden if (h.attempt, h.id) not in listed and (only is not None or _is_due(run, h))]
    held = active_holds(run) if due else {}
    due = [h for h in due if h.attempt not in held]
    if due:
        audit.record(run, Action.SWEEP, dict.fromkeys(h.attempt for h in due), "")
    decided_now = {h: _decide(run, h.attempt, h.id, swept=True) for h in due}
    both = (decided | decided_now).items()
    swept = [h for h, fate in both if fate.swept and _is_left(run, h.attempt, h.id)]
    to_delete = {h.attempt for h in swept}
    freed = sum(_delete(run, attempt) for attempt in _present(run, to_delete))
    if to_delete:
        unmark(run, [found for found in marks(run) if found.by in to_delete])
    for error in damage.values():
        raise error
    return Swept(tuple(dict.fromkeys(h.attempt for h in swept if h in decided_now)), freed)


def list_hidden(run: Run) -> list[Hidden]:
    """All tombstones of a run, by attempt."""
    return sorted(_parse(run.store.list(run.keys.tombstones)), key=lambda h: (h.attempt, h.id))


def list_fates(run: Run) -> set[tuple[Attempt, str]]:
    """The attempts and ids of all tombstones that are decided."""
    return {(fate.attempt, fate.id) for fate in _parse(run.store.list(run.keys.fates))}


def find_hidden(run: Run, reference: Reference) -> Attempt:
    """The hidden attempt of a reference; if a step has several, the one saved last of those that are not swept.

    Raises NoCheckpoint.
    """
    found = [
        h.attempt
        for h in list_hidden(run)
        if h.attempt.step == reference.step and reference.ulid in (None, h.attempt.ulid)
    ]
    if not found:
        raise NoCheckpoint(
            f"run {run.name!r} has no deleted checkpoint at step {reference.step}", "ckptctl undelete lists them"
        )
    decided = decided_attempts(run) if len(set(found)) > 1 else []
    return max(found, key=lambda attempt: (attempt in decided, attempt))


def read_tombstone(run: Run, hidden: Hidden) -> Tombstone | None:
    """The tombstone document; None if it is deleted or damaged."""
    key = run.keys.tombstone(hidden.attempt, hidden.id)
    try:
        return parse_sealed(run.store.get(key), Tombstone, run.store.object_url(key))
    except (Damaged, ObjectMissing):
        return None


def forget_tombstones(run: Run) -> None:
    """Remove tombstones and fates a week after the data is deleted. The list of the dead names the attempts by then."""
    listed = _parse(run.store.list(run.keys.fates))
    old = {(fate.attempt, fate.id) for fate in listed if run.age_s(fate.written_at) > TOMBSTONE_KEPT_S}
    hidden = [h for h in list_hidden(run) if (h.attempt, h.id) in old]
    decided, _ = _fates(run, hidden)
    swept = {h.attempt for h, fate in decided.items() if fate.swept}
    buried = bury(run, swept.difference(_present(run, swept)))
    undeleted = {h for h, fate in decided.items() if not fate.swept}
    kept = {(h.attempt, h.id) for h in hidden if h.attempt not in buried and h not in undeleted}
    forgotten = sorted(old - kept)
    tombstones = [run.keys.tombstone(h.attempt, h.id) for h in hidden if (h.attempt, h.id) not in kept]
    # Tombstones first: a tombstone without its fate could be decided again.
    run.store.delete_many([*tombstones, *(run.keys.fate(attempt, id) for attempt, id in forgotten)])


def delete_leftovers(run: Run, attempts: Collection[Attempt]) -> int:
    """Delete what dead attempts have left: what a process that slept for weeks wrote. Returns the number of bytes."""
    freed = sum(_delete(run, attempt) for attempt in attempts)
    if attempts:
        unmark(run, [found for found in marks(run) if found.by in attempts])
    return freed


def delete_data(run: Run, attempt: Attempt) -> int:
    """Delete everything that an attempt wrote before its outcome. Returns the number of bytes freed."""
    objects = list(run.store.list(run.keys.attempt(attempt)))
    # Receipts first: without them the rest is not mistaken for a complete attempt.
    objects.sort(key=lambda info: names.receipt_rank(info.key) is None)
    run.store.delete_many(info.key for info in objects)
    return sum(info.bytes for info in objects)


def _write_tombstone(run: Run, attempt: Attempt, reason: str, grace_s: float) -> str:
    now = run.clock()
    id = new_ulid(now)
    tombstone = Tombstone(
        format=oldest_format(attempt),
        kind="tombstone",
        attempt=str(attempt),
        by=run.by,
        at=now,
        reason=reason,
        grace_s=grace_s,
    )
    run.store.put(run.keys.tombstone(attempt, id), seal(tombstone))
    return id


def _cancel_deletion(run: Run, attempt: Attempt, ids: Sequence[str]) -> bool:
    """Undelete the tombstones `ids`. False if one of them is decided as swept."""
    if any(_decide(run, attempt, id, swept=False).swept for id in ids):
        return False
    if not all(_is_left(run, attempt, id) for id in ids) and not _has_outcome(run, attempt):
        return False  # swept and forgotten
    run.store.delete_many(run.keys.tombstone(attempt, id) for id in ids)
    return True


def _decide(run: Run, attempt: Attempt, id: str, *, swept: bool) -> Fate:
    """Create the fate of a tombstone, or return the existing one. Durable on return."""
    proposal = Fate(
        format=oldest_format(attempt),
        kind="fate",
        attempt=str(attempt),
        tombstone=id,
        swept=swept,
        by=run.by,
        at=run.clock(),
    )
    failure: StoreUnavailable | None = None
    for _ in range(_TRIES):
        try:
            if run.store.put_if_absent(run.keys.fate(attempt, id), seal(proposal)):
                return proposal
            # After a lost reply this may be our own fate, which is then returned like any other.
            fate = _read_fate(run, attempt, id)
        except StoreUnavailable as error:
            failure = error
            continue
        if fate is not None:
            return fate
    raise failure or StoreUnavailable(
        f"cannot read whether {run.id_of(attempt)} in {run.store.url} is swept or undeleted",
        "Try again: the decision does not change",
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


def _has_outcome(run: Run, attempt: Attempt) -> bool:
    """Whether it has an outcome that counts, and not one that was created again after it was swept and forgotten."""
    return attempt in decided_attempts(run) and attempt not in Dead(run)


def _is_left(run: Run, attempt: Attempt, id: str) -> bool:
    """Whether a tombstone still exists, asked after its fate is known.

    A fate expires. A process that slept for weeks may then create that of a tombstone that was removed long ago, with
    another decision (docs/decisions/0027).
    """
    try:
        run.store.get(run.keys.tombstone(attempt, id))
    except ObjectMissing:
        return False
    return True


def _fates(run: Run, hidden: Collection[Hidden]) -> tuple[dict[Hidden, Fate], dict[Hidden, Damaged]]:
    """The fates of decided tombstones, and the errors of those whose fate is damaged."""
    decided: dict[Hidden, Fate] = {}
    damage: dict[Hidden, Damaged] = {}
    for one in hidden:
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
    return run.age_s(hidden.written_at) >= grace_s


def _present(run: Run, attempts: Collection[Attempt]) -> list[Attempt]:
    """The attempts that still have an outcome or data."""
    if not attempts:
        return []
    decided, folders = set(decided_attempts(run)), set(run.store.list_folders(run.keys.attempts))
    return sorted(a for a in attempts if a in decided or (str(a) in folders and has_data(run, a)))


def has_data(run: Run, attempt: Attempt) -> bool:
    """Whether an attempt has any object. SeaweedFS lists the empty folders of deleted objects."""
    return next(iter(run.store.list(run.keys.attempt(attempt))), None) is not None


def _delete(run: Run, attempt: Attempt) -> int:
    """Delete labels, findings and outcome, then the data, of a swept attempt. Returns the number of bytes freed."""
    run.store.delete_many(
        [
            *(run.keys.labels_version(attempt, version) for version in label_versions(run).get(attempt, ())),
            run.keys.verified_record(attempt),
            run.keys.quarantine_record(attempt),
            run.keys.drill(attempt),
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
            continue  # a foreign object
