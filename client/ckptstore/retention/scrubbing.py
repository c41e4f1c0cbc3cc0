"""Scrubbing: full reads of stored checkpoints, the longest unverified first.

Scrubs are rate limited, so that they do not slow down training. Every finding is durable before the next checkpoint
is read, so that an interrupted scrub resumes where it stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckptstore.clock import Clock, system_clock
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.commits.labels import find
from ckptstore.commits.leases import release_lease, renew_lease, take_lease
from ckptstore.commits.references import marks
from ckptstore.errors import Damaged, NoCheckpoint
from ckptstore.fleet import Unit
from ckptstore.format.documents import FORMAT
from ckptstore.format.records import Finding
from ckptstore.names import Attempt, Reference
from ckptstore.reading.fetch import Progress
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import Verification, VerifiedChunks, verify
from ckptstore.retention.healing import heal
from ckptstore.run import Run
from ckptstore.stores import Store, open_store

_LEASE_S = 3600.0


def rate_limiter(bytes_per_s: float, clock: Clock) -> Progress:
    """A function that records bytes read, and sleeps until all its callers together are within this rate; 0: no limit.
    Any thread may call it."""
    lock, free_at = threading.Lock(), clock()

    def limit(count: int) -> None:
        nonlocal free_at
        if bytes_per_s:
            with lock:
                now = clock()
                free_at = max(free_at, now) + count / bytes_per_s
                ahead_s = free_at - now
            time.sleep(ahead_s)

    return limit


def due_for_scrub(runs: Iterable[Run], older_than: float = float("inf"), damaged: bool = False) -> list[Checkpoint]:
    """Checkpoints never verified, then those verified before `older_than` (seconds since the epoch), oldest first.

    damaged: include checkpoints that are already known to be damaged; they count as never verified.
    """
    due = []
    for run in runs:
        verified = verified_at(run)
        for checkpoint in list_checkpoints(run):
            at = verified.get(checkpoint.attempt, 0.0)
            if (damaged or checkpoint.state is not State.CORRUPT) and at < older_than:
                due.append((at, checkpoint.committed_at, checkpoint))
    return [checkpoint for _, _, checkpoint in sorted(due, key=lambda item: item[:2])]


def due_newest(run: Run, every_s: float, again_s: float) -> Checkpoint | None:
    """The newest checkpoint of a run, if it is to be verified before others.

    every_s: seconds between verifications of a run that saves. again_s: seconds between those of the same checkpoint.
    """
    verified = verified_at(run)
    try:
        newest = latest(run)
    except (Damaged, NoCheckpoint):
        return None
    known = newest.attempt in verified
    at = verified[newest.attempt] if known else max(verified.values(), default=float("-inf"))
    # A time in the future comes from a wrong clock.
    return newest if abs(run.clock() - at) >= (again_s if known else every_s) else None


def scrub(
    store: Store,
    checkpoints: Iterable[Checkpoint],
    by: str,
    clock: Clock,
    progress: Progress = lambda _: None,
    throttle: Progress = lambda _: None,
    checked: VerifiedChunks | None = None,
    heal_from: Sequence[Store] | None = None,
    ranks: Collection[int] | None = None,
) -> Iterator[Verification]:
    """Verify checkpoints one by one and record each finding; a finding is durable when it is yielded.

    progress is called with the number of stored bytes checked. throttle is called with the number of bytes read and may
    block (rate_limiter). Several threads call both. checked: share one between scrubs that belong together. An intact
    chunk that several checkpoints need is read once. heal_from: write damaged objects again from other checkpoints of
    the run and from these copies of the store, and verify once more. ranks: as for verify. Checkpoints that are deleted
    during the scrub are skipped. Raises Unavailable, which is not a finding.
    """
    source = StoreSource(store, clock)
    checked = checked or VerifiedChunks()
    for checkpoint in checkpoints:
        run = Run(store, checkpoint.run, clock, by)
        with leased(run, checkpoint, throttle) as read:
            if read is None:
                continue
            # Ignore an earlier finding and verify again. An unreadable outcome is itself a finding.
            known = replace(checkpoint, state=State.COMMITTED) if checkpoint.manifest_digest else checkpoint
            checked.referenced |= {(checkpoint.run, mark.attempt) for mark in marks(run)}
            result = verify(source, known, progress, checked=checked, throttle=read, ranks=ranks)
            if heal_from is not None and not result.ok and known.manifest_digest:
                healed = heal(run, result, heal_from, read)
                result = verify(source, known, checked=checked, throttle=read) if healed.objects else result
                result = result._replace(healed=healed.objects, problems=(*result.problems, *healed.problems))
            if _was_deleted(run, checkpoint):
                continue
            record_finding(run, result)
        yield result


def scrub_unit(url: str, by: str, heals: bool, ranks: Collection[int] | None, unit: Unit) -> list[Verification]:
    """As `scrub`, of the checkpoints of a unit, in any process that reaches the store."""
    store = open_store(url)
    chosen = [find(Run(store, each.run), each) for each in map(Reference.parse, unit.targets)]
    return list(scrub(store, chosen, by, system_clock, heal_from=() if heals else None, ranks=ranks))


def confirm_damage(
    run: Run, checkpoint: Checkpoint, chunks: Collection[tuple[str, int]], progress: Progress
) -> Verification | None:
    """Check chunks that a reader found damaged, and all documents of their checkpoint; record a finding if they are.

    The finding is durable on return. A reader's word does not suffice: its memory, its network or a cache may be
    the cause. Nothing is recorded if no problem is found, because most chunks were not read. Returns None if the
    checkpoint is being deleted. Raises Unavailable, which is not a finding.
    """
    with leased(run, checkpoint) as read:
        if read is None:
            return None
        result = verify(StoreSource(run.store, run.clock), checkpoint, progress, only=chunks)
        if not result.ok:
            if _was_deleted(run, checkpoint):
                return None
            record_finding(run, result)
        return result


def _was_deleted(run: Run, checkpoint: Checkpoint) -> bool:
    """Whether it is being deleted or thinned, after the lease expired because the process slept: missing data is no
    damage."""
    return bool(hidden_attempts(run).lost(checkpoint.attempt, checkpoint.thinned))


@contextmanager
def leased(run: Run, checkpoint: Checkpoint, progress: Progress = lambda _: None) -> Iterator[Progress | None]:
    """Protect a checkpoint while it is read; None if it is being deleted.

    Yields the same callback, which also renews the lease. Any thread may call it.
    """
    holder, lock, taken_at = f"scrub by {run.by}", threading.Lock(), run.clock()
    try:
        lease = take_lease(run, checkpoint.attempt, holder, _LEASE_S, checkpoint.thinned)
    except NoCheckpoint:
        yield None
        return

    def renew(count: int) -> None:
        nonlocal taken_at
        with lock:
            age_s = run.clock() - taken_at
            # A lease that has expired must not be renewed: the checkpoint may be deleted by now.
            if _LEASE_S / 4 < age_s < _LEASE_S:
                taken_at = run.clock()
                renew_lease(run, lease, checkpoint.attempt, holder, _LEASE_S)
        progress(count)

    try:
        yield renew
    finally:
        release_lease(run, lease)


def record_finding(run: Run, result: Verification) -> None:
    """Record the result of a verification; durable on return."""
    attempt = result.checkpoint.attempt
    finding = Finding(
        format=FORMAT, kind="finding", attempt=str(attempt), at=run.clock(), by=run.by,
        num_chunks=result.num_chunks, stored_bytes=result.stored_bytes, problems=list(result.problems),
    )  # fmt: skip
    intact, damaged = run.keys.verified_record(attempt), run.keys.quarantine_record(attempt)
    valid, obsolete = (intact, damaged) if result.ok else (damaged, intact)
    run.write(valid, finding)
    run.store.delete_many([obsolete])


def verified_at(run: Run) -> dict[Attempt, float]:
    """When attempts were last found intact, by the store's clock."""
    return {attempt: info.modified_at for attempt, _, info in run.listed(run.keys.verified)}
