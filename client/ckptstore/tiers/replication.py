"""Replication: commits the checkpoints of a local tier in the remote one, oldest first, under the same names.

A copy has the same bytes as the original, object for object, and is committed by the same protocol: it exists as a
whole or not at all, and an interrupted one continues where it stopped. The replication queue is the set of checkpoints
that are pinned as `far` in the local tier: no prune removes them before they are replicated, and it outlives every
process.

Generations have the same numbers in both stores, so the remote one sees the lineage that the local one has. If another
trainer began a generation in the remote store that the local one's trainers had not seen, it has continued the run:
then nothing of the local tier may be committed there any more. docs/decisions/0037 has the sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence, Set

import msgspec

from ckptstore.commits.catalog import Checkpoint, from_outcome, visible_attempts
from ckptstore.commits.commit import commit_attempt, read_outcome, receipt_ranks
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
from ckptstore.format.documents import Generation, Outcome, Receipt
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import parse_sealed
from ckptstore.format.statistics import side_documents
from ckptstore.names import Attempt, derive_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.reading.source import (
    StoreSource,
    check_manifest_data,
    read_manifest,
    receipt_data,
    stored_statistics,
)
from ckptstore.retention.deletion import hide, sweep
from ckptstore.retention.pins import active_holds, hold, pinned
from ckptstore.retry import pauses
from ckptstore.run import Run
from ckptstore.tiers.copying import chunks_by_shard, copy_labels, copy_shard

QUEUED = "far"
"""The pin of the replication queue."""
UNREPLICABLE = "stranded"
"""The pin of checkpoints that cannot be replicated any more: another trainer has continued the run in the remote
store."""
_PATIENCE_S, _PATIENCE = 30.0, 3.0
"""How long a replicator waits for other ranks to copy their shards: this, or this many times what its own took."""
_LOOK_S, _LONGEST_LOOK_S = 0.1, 2.0
KEPT_S = 30 * 24 * 3600.0
"""How long an incomplete copy waits for its replicator: longer than outages, and the absence of an operator."""

Generations = dict[int, Generation | None]
"""By number; None: damaged."""
Known = dict[Attempt, Checkpoint | None]
"""The checkpoints of decided attempts; None: aborted. An outcome never changes, so each is read once."""


FOR_GOOD = (Conflict, Damaged, NotFound)
"""Errors that this program meets again at each later try; all others may pass."""


def enqueue(local: Run, attempt: Attempt) -> None:
    """A checkpoint of the local tier is to be replicated; durable on return. Idempotent. Raises Unavailable."""
    hold(local, attempt, QUEUED)


def queued(local: Run) -> list[Attempt]:
    """The attempts to be replicated, oldest first."""
    return sorted(attempt for attempt, held in pinned(local).items() if QUEUED in held)


def replication_queue(local: Run, known: Known) -> list[Checkpoint]:
    """The checkpoints of a run that are in the local tier only, and are to be replicated, oldest first; one that its
    committer has not committed yet does not count.

    known: of earlier calls; this one adds to it.
    """
    # A pinned checkpoint is not hidden: that need not be looked up for each.
    found = (_decided(local, attempt, known) for attempt in queued(local))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def replicate(
    local: Run, remote: Run, attempt: Attempt, progress: Progress = lambda _: None, own: int | None = None
) -> Checkpoint | None:
    """Commit a checkpoint of the local tier in the remote one, and remove it from the replication queue; durable on
    return.

    Returns its remote checkpoint; None if the local tier has no such checkpoint. Safe from several processes: all write
    the same bytes. progress: called with the stored bytes that were copied, or found in the remote store and verified.
    own: the rank of the caller, where the other ranks copy their shards (`copy_rank`): they are waited for, as long as
    they may take. Raises Superseded if another trainer has continued the run; AttemptAborted if its remote attempt, or
    one that it references, was aborted; ReferenceLost if the remote store has deleted a checkpoint whose chunks it
    needs; CorruptObject or ObjectMissing if it is damaged; Unavailable if either store is away.
    """
    original = _committed(local, attempt)
    if original is None:
        _release(local, attempt)
        return None
    lease = derive_ulid(attempt.ulid, "carrying")  # on the remote copy: the same at each try, for each replicator
    try:
        newest = establish(local, remote, attempt.generation)
        outcome = read_outcome(remote, attempt)
        if outcome is None:
            # Otherwise a collection would abort an incomplete copy as an orphan after a day.
            renew_lease(remote, lease, attempt, f"{remote.by}, which replicates it", KEPT_S)
            outcome = _commit_copy(local, remote, original, newest, progress, own)
        elif outcome.committed is None:
            # By a generation of this local tier, if that is why: others roll a complete copy forward, and know no
            # better.
            raise AttemptAborted(
                f"{original.id} was aborted in {remote.store.url} by {outcome.by}",
                "It was not replicated for too long. Copy it by hand: ckptctl cp, with --as if the run has gone on",
            )
        replicated = from_outcome(outcome)
        assert replicated is not None
        copy_labels(StoreSource(local.store), with_labels(local, [original])[0], remote, replicated)
    except FOR_GOOD:
        release_lease(remote, lease)
        raise
    release_lease(remote, lease)
    _release(local, attempt)
    return replicated


def copy_rank(local: Run, remote: Run, attempt: Attempt, rank: int, progress: Progress) -> None:
    """Copy the shards and the receipt of a rank, for a replicator that commits the checkpoint; durable on return. So
    also those of checkpoints that it references.

    Raises as `replicate`.
    """
    original = _committed(local, attempt)
    if original is not None:
        establish(local, remote, attempt.generation)
        if read_outcome(remote, attempt) is None:
            for needed in referenced_attempts(read_manifest(StoreSource(local.store), original).content):
                copy_rank(local, remote, needed, rank, progress)
            _copy_ranks(local, remote, original, {rank}, progress)


def trim(local: Run, keep: int, known: Known) -> Sequence[Attempt]:
    """Delete the checkpoints of the local tier, apart from the newest `keep` and those that are held.

    The replication queue is held by its pins, what newer checkpoints reference by marks, what is being restored by
    leases.
    known: of earlier calls; this one adds to it, and forgets what is gone. Returns the attempts whose data is deleted.
    Raises Unavailable.
    """
    visible = visible_attempts(local)
    before = list(known)  # at once: another thread may add to it
    for attempt in set(before).difference(visible):
        del known[attempt]
    surplus = [attempt for attempt in visible if _decided(local, attempt, known) is not None][keep:]
    held = active_holds(local) if surplus else {}
    surplus = [attempt for attempt in surplus if attempt not in held]
    if not surplus and not local.store.listing_lag_s:  # with a lag, those of an earlier call may be due
        return ()
    hide(local, surplus, f"the newest {keep} stay local", grace_s=0.0)
    return sweep(local, only=surplus).attempts


def mark_unreplicable(local: Run, attempt: Attempt) -> None:
    """A checkpoint can no longer be replicated: it stays local, pinned, until an operator decides. Raises
    Unavailable."""
    hold(local, attempt, UNREPLICABLE)
    _release(local, attempt)


def unreplicable(local: Run) -> set[Attempt]:
    """The attempts that are never replicated. Checkpoints that reference them cannot be replicated either."""
    return {attempt for attempt, held in pinned(local).items() if UNREPLICABLE in held}


def establish(local: Run, remote: Run, number: int) -> int:
    """Begin a generation of the local tier in the remote one, under the same number; durable on return. Idempotent.

    Earlier generations that are missing there are begun too: a committer looks for the next number. Returns the newest
    generation of the remote store. It may be newer than `number`, since trainers on one local tier follow each other.
    Raises Superseded if another trainer has begun one that they had not seen; CorruptObject; Unavailable.
    """
    documents = read_generations(local)
    own = documents.get(number)
    if own is None:
        raise CorruptObject(f"generation {number} of run {local.name!r} in {local.store.url} is missing or damaged")
    seen = seen_generation(documents, number)
    while True:
        listed = list(list_generations(remote))
        unknown = unseen(documents, read_generations(remote, [other for other in listed if other > seen]))
        if unknown:
            raise Superseded(
                f"another trainer has begun generation {unknown[0]} of run {remote.name!r} in {remote.store.url}: what "
                f"this one has saved in {local.store.url} is not committed there",
                "Stop this trainer, or restore first to continue from what is in the remote store. Its checkpoints "
                f"stay local, pinned as {UNREPLICABLE!r}",
            )
        newest = max(listed, default=0)
        if newest < number:
            newest = newest_generation(remote, listed)  # lists all outcomes
        for missing in range(newest + 1, number + 1):
            begun = documents.get(missing) or msgspec.structs.replace(own, number=missing)
            if create_generation(remote, begun) is None:
                break  # taken meanwhile: look again
        else:
            return max(newest, number)


def seen_generation(local: Generations, number: int) -> int:
    """The newest generation of the remote store that was known in the local one when `number` was begun. Pure."""
    begun = (document for known, document in local.items() if document and known <= number)
    return max((document.extension(SEEN, int) or 0 for document in begun), default=0)


def unseen(local: Generations, remote: Generations) -> list[int]:
    """The generations of the remote store that no trainer of the local one began. Pure."""
    sessions = {document.session for document in local.values() if document is not None}
    return sorted(number for number, document in remote.items() if document is None or document.session not in sessions)


def _commit_copy(
    local: Run, remote: Run, original: Checkpoint, newest: int, progress: Progress, own: int | None
) -> Outcome:
    """Copy all objects of an attempt, and commit it."""
    source = StoreSource(local.store)
    manifest = read_manifest(source, original)
    ranks = range(manifest.world_size)
    left = set(ranks)
    try:
        for needed in referenced_attempts(manifest.content):
            if _committed(remote, needed) is None and replicate(local, remote, needed, progress, own) is None:
                raise reference_lost(remote, original.attempt, needed)
        if own is not None:
            began = time.monotonic()
            _copy_ranks(local, remote, original, {own}, progress)
            patience_s = max(_PATIENCE_S, _PATIENCE * (time.monotonic() - began))
            for pause_s in pauses(_LOOK_S, _LONGEST_LOOK_S, timeout_s=patience_s):
                if not (left := left - receipt_ranks(remote, original.attempt)):
                    break
                time.sleep(pause_s)
        _copy_ranks(local, remote, original, left, progress)
        found = (receipt_data(source, original, manifest, rank) for rank in ranks)
        receipts = [StoredReceipt.of(parse_sealed(data, Receipt, name), data) for data, name in found]
        return commit_attempt(remote, receipts, newest)
    except Superseded as error:
        establish(local, remote, original.attempt.generation)  # raises it if another trainer has continued the run
        raise AttemptAborted(f"{original.id} is not committed in {remote.store.url}: {error.message}") from error


def _copy_ranks(local: Run, remote: Run, original: Checkpoint, ranks: Set[int], progress: Progress) -> None:
    """Copy the shards of ranks, and then their receipts."""
    source, keys, attempt = StoreSource(local.store), local.keys, original.attempt
    data = source.manifest_data(original)
    manifest = check_manifest_data(original, data)
    # Before the receipts, by which others could commit it: another version of zstd would pack it differently.
    remote.store.put_if_absent(keys.manifest(attempt), data)
    chunks = chunks_by_shard(manifest)
    for shard, side in zip(manifest.content.shards, side_documents(manifest), strict=True):
        if shard.rank in ranks:
            reads = [msgspec.structs.replace(read, bases=()) for read in chunks[shard.name] if read.attempt is None]
            statistics = stored_statistics(source, original, shard.rank, side)
            apart = side is None or side.offset is None
            copy_shard(source, original, shard, reads, statistics, apart, remote, attempt, progress)
    for rank in sorted(ranks):
        data, _ = receipt_data(source, original, manifest, rank)
        remote.store.put(keys.receipt(attempt, rank), data)


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


def _release(local: Run, attempt: Attempt) -> None:
    local.store.delete_many([local.keys.pin(attempt, QUEUED)])
