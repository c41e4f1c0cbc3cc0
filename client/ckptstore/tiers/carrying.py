"""Carrying: commits the checkpoints of a near store in the far one, oldest first, under the same names.

A copy has the same bytes as the original, object for object, and is committed by the same protocol: it exists as a
whole or not at all, and an interrupted one continues where it stopped. The backlog is the set of checkpoints that are
pinned as `far` in the near store: no prune removes them before they are carried, and it outlives every process.

Generations have the same numbers in both stores, so the far one sees the lineage that the near one has. If another
trainer began a generation in the far store that the near one's trainers had not seen, it has continued the run: then
nothing of the near store may be committed there any more. docs/decisions/0037 has the sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ckptstore.commits.catalog import Checkpoint, from_outcome, visible_attempts
from ckptstore.commits.commit import commit_attempt, read_outcome
from ckptstore.commits.generations import (
    SEEN,
    create_generation,
    list_generations,
    newest_generation,
    read_generations,
)
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.commits.labels import with_labels
from ckptstore.commits.leases import release_lease, renew_lease
from ckptstore.commits.references import reference_lost, referenced_attempts
from ckptstore.errors import AttemptAborted, Conflict, CorruptObject, Damaged, NotFound, Superseded
from ckptstore.format.documents import Generation, Manifest, Outcome, Receipt, digest
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.statistics import side_documents
from ckptstore.names import Attempt, derive_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.reading.source import StoreSource, check_manifest_data, stored_statistics
from ckptstore.retention.deletion import hide, sweep
from ckptstore.retention.pins import active_holds, hold, pinned
from ckptstore.run import Run
from ckptstore.tiers.copying import chunks_by_shard, copy_labels, copy_shard

QUEUED = "far"
"""The pin of the backlog."""
STRANDED = "stranded"
"""The pin of checkpoints that cannot be carried any more: another trainer has continued the run in the far store."""
KEPT_S = 30 * 24 * 3600.0
"""How long an incomplete copy waits for its carrier: longer than outages, and the absence of an operator."""

Known = dict[Attempt, Checkpoint | None]
"""The checkpoints of decided attempts; None: aborted. An outcome never changes, so each is read once."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The checkpoints of a run that are in the near store only, and are to be carried."""

    attempts: tuple[Attempt, ...]
    """Oldest first."""
    bytes: int
    """Stored bytes, of references too."""
    since: float | None
    """When the oldest one was committed, by the clock of its committer; None if there is none."""


def enqueue(near: Run, attempt: Attempt) -> None:
    """A checkpoint of the near store is to be carried; durable on return. Idempotent. Raises Unavailable."""
    hold(near, attempt, QUEUED)


def queued(near: Run) -> list[Attempt]:
    """The attempts to be carried, oldest first."""
    return sorted(attempt for attempt, held in pinned(near).items() if QUEUED in held)


def backlog(near: Run, known: Known | None = None) -> Backlog:
    """The backlog of a run; one that its committer has not committed yet does not count.

    known: of earlier calls; this one adds to it.
    """
    # A pinned checkpoint is not hidden: that need not be looked up for each.
    known = {} if known is None else known
    found = [(attempt, _decided(near, attempt, known)) for attempt in queued(near)]
    there = [(attempt, checkpoint) for attempt, checkpoint in found if checkpoint is not None]
    return Backlog(
        tuple(attempt for attempt, _ in there),
        sum(checkpoint.needed_bytes for _, checkpoint in there),
        min((checkpoint.committed_at for _, checkpoint in there), default=None),
    )


def carry(near: Run, far: Run, attempt: Attempt, progress: Progress = lambda _: None) -> Checkpoint | None:
    """Commit a checkpoint of the near store in the far one, and remove it from the backlog; durable on return.

    Returns its far checkpoint; None if the near store has no such checkpoint. Safe from several processes: all write
    the same bytes. progress: called with the stored bytes that were copied, or found in the far store and verified.
    Raises Superseded if another trainer has continued the run; AttemptAborted if its far attempt, or one that it
    references, was aborted; ReferenceLost if the far store has deleted a checkpoint whose chunks
    it needs; CorruptObject or ObjectMissing if it is damaged; Unavailable if either store is away.
    """
    original = _committed(near, attempt)
    if original is None:
        _release(near, attempt)
        return None
    try:
        carried = _carry(near, far, original, progress)
    except (Conflict, Damaged, NotFound):  # no later try helps
        release_lease(far, _lease(attempt))
        raise
    release_lease(far, _lease(attempt))
    _release(near, attempt)
    return carried


def _carry(near: Run, far: Run, original: Checkpoint, progress: Progress) -> Checkpoint:
    attempt = original.attempt
    newest = establish(near, far, attempt.generation)
    outcome = read_outcome(far, attempt)
    if outcome is None:
        # Otherwise a collection would abort an incomplete copy as an orphan after a day.
        renew_lease(far, _lease(attempt), attempt, f"{far.by}, which carries it", KEPT_S)
        outcome = _commit_copy(near, far, original, newest, progress)
    elif outcome.committed is None:
        # By a generation of this near store, if that is why: others roll a complete copy forward, and know no better.
        raise AttemptAborted(
            f"{original.id} was aborted in {far.store.url} by {outcome.by}",
            "It was not carried for too long. Copy it by hand: ckptctl cp, with --as if the run has gone on",
        )
    carried = from_outcome(outcome)
    assert carried is not None
    copy_labels(StoreSource(near.store), with_labels(near, [original])[0], far, carried)
    return carried


def trim(near: Run, keep: int, known: Known | None = None) -> Sequence[Attempt]:
    """Delete the checkpoints of the near store, apart from the newest `keep` and those that are held.

    The backlog is held by its pins, what newer checkpoints reference by marks, what is being restored by leases.
    known: of earlier calls; this one adds to it, and forgets what is gone. Returns the attempts whose data is deleted.
    Raises Unavailable.
    """
    known, visible = {} if known is None else known, visible_attempts(near)
    before = list(known)  # at once: another thread may add to it
    for attempt in set(before).difference(visible):
        del known[attempt]
    found = [attempt for attempt in visible if _decided(near, attempt, known) is not None]
    surplus = found[keep:]
    held = active_holds(near) if surplus else {}
    surplus = [attempt for attempt in surplus if attempt not in held]
    if not surplus:
        return ()
    hide(near, surplus, f"the newest {keep} stay near", grace_s=0.0)
    return sweep(near, only=surplus).attempts


def strand(near: Run, attempt: Attempt) -> None:
    """A checkpoint can no longer be carried: it stays near, pinned, until an operator decides. Raises Unavailable."""
    hold(near, attempt, STRANDED)
    _release(near, attempt)


def stranded(near: Run) -> set[Attempt]:
    """The attempts that are never carried. What references them cannot be carried either."""
    return {attempt for attempt, held in pinned(near).items() if STRANDED in held}


def establish(near: Run, far: Run, number: int) -> int:
    """Begin a generation of the near store in the far one, under the same number; durable on return. Idempotent.

    Earlier generations that are missing there are begun too: a committer looks for the next number. Returns the newest
    generation of the far store. It may be newer than `number`, since trainers on one near store follow each other.
    Raises Superseded if another trainer has begun one that they had not seen; CorruptObject; Unavailable.
    """
    documents = read_generations(near)
    own = documents.get(number)
    if own is None:
        raise CorruptObject(f"generation {number} of run {near.name!r} in {near.store.url} is missing or damaged")
    seen = seen_generation(documents, number)
    while True:
        listed = list(list_generations(far))
        unknown = unseen(documents, read_generations(far, [other for other in listed if other > seen]))
        if unknown:
            raise Superseded(
                f"another trainer has begun generation {unknown[0]} of run {far.name!r} in {far.store.url}: what this "
                f"one has saved in {near.store.url} is not committed there",
                "Stop this trainer, or restore first to continue from what is in the far store. Its checkpoints stay "
                f"near, pinned as {STRANDED!r}",
            )
        newest = max(listed, default=0)
        if newest < number:
            newest = newest_generation(far, listed)  # lists all outcomes
        for missing in range(newest + 1, number + 1):
            begun = documents.get(missing) or msgspec.structs.replace(own, number=missing)
            if create_generation(far, begun) is None:
                break  # taken meanwhile: look again
        else:
            return max(newest, number)


def seen_generation(near: Mapping[int, Generation | None], number: int) -> int:
    """The newest generation of the far store that was known in the near one when `number` was begun. Pure."""
    return max((_seen(document) for known, document in near.items() if document and known <= number), default=0)


def unseen(near: Mapping[int, Generation | None], far: Mapping[int, Generation | None]) -> list[int]:
    """The generations of the far store that no trainer of the near one began. Pure."""
    sessions = {document.session for document in near.values() if document is not None}
    return sorted(number for number, document in far.items() if document is None or document.session not in sessions)


def _seen(document: Generation) -> int:
    seen = document.extensions.get(SEEN, 0)
    return seen if isinstance(seen, int) else 0


def _commit_copy(near: Run, far: Run, original: Checkpoint, newest: int, progress: Progress) -> Outcome:
    try:
        return commit_attempt(far, _copy(near, far, original, progress), newest)
    except Superseded as error:
        establish(near, far, original.attempt.generation)  # raises it if another trainer has continued the run
        raise AttemptAborted(f"{original.id} is not committed in {far.store.url}: {error.message}") from error


def _lease(attempt: Attempt) -> str:
    """The lease on the far copy: the same one at each try, and for each carrier."""
    return derive_ulid(attempt.ulid, "carrying")


def _copy(near: Run, far: Run, original: Checkpoint, progress: Progress) -> list[StoredReceipt]:
    """Copy all objects of an attempt; returns its receipts."""
    source, keys, attempt = StoreSource(near.store), near.keys, original.attempt
    data = source.manifest_data(original)
    manifest = check_manifest_data(original, data)
    for needed in referenced_attempts(manifest.content):
        if _committed(far, needed) is None and carry(near, far, needed, progress) is None:
            raise reference_lost(far, attempt, needed)
    chunks = chunks_by_shard(manifest)
    for shard, side in zip(manifest.content.shards, side_documents(manifest), strict=True):
        statistics = stored_statistics(source, original, shard.rank, side)
        apart = side is None or side.offset is None
        if reads := [read for read in chunks[shard.name] if read.attempt is None]:
            tail = b"" if apart else statistics
            copy_shard(source, original, reads, far, keys.shard(attempt, shard.name), progress, tail)
        if apart and statistics:
            far.store.put(keys.statistics(attempt, shard.rank), statistics)
    # Before the receipts, by which others could commit it: another version of zstd would pack it differently.
    far.store.put_if_absent(keys.manifest(attempt), data)
    return [_copy_receipt(near, far, manifest, attempt, rank) for rank in range(manifest.world_size)]


def _copy_receipt(near: Run, far: Run, manifest: Manifest, attempt: Attempt, rank: int) -> StoredReceipt:
    key = near.keys.receipt(attempt, rank)
    data = near.store.get(key)
    if digest(data) != manifest.receipts[rank].digest:
        raise CorruptObject(f"the receipt of rank {rank} of {near.id_of(attempt)} does not match its manifest")
    far.store.put(far.keys.receipt(attempt, rank), data)
    return StoredReceipt.of(parse_sealed(data, Receipt, near.store.object_url(key)), data)


def _decided(run: Run, attempt: Attempt, known: Known) -> Checkpoint | None:
    """The checkpoint of an attempt, if it is committed, hidden or not."""
    try:
        return known[attempt]
    except KeyError:  # no test before: another thread may forget it in between
        outcome = read_outcome(run, attempt)
        if outcome is None:
            return None
        return known.setdefault(attempt, from_outcome(outcome))


def _committed(run: Run, attempt: Attempt) -> Checkpoint | None:
    """The checkpoint of an attempt, if it exists."""
    found = _decided(run, attempt, {})
    return found if found is not None and attempt not in hidden_attempts(run) else None


def _release(near: Run, attempt: Attempt) -> None:
    near.store.delete_many([near.keys.pin(attempt, QUEUED)])
