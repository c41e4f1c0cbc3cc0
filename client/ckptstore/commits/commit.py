"""The commit protocol: receipts are merged into a manifest, and one create-only object decides.

Order of events for one attempt (docs/decisions/0001):

    1. every rank makes its shard durable, then writes its receipt
    2. a committer reads all receipts, merges them, creates manifest.json.zst, and marks the attempts they reference
    3. it creates the outcome as committed        <- from here on the checkpoint exists
    4. it looks at the list of deleted attempts, in case it slept for weeks before 3 (docs/decisions/0025)

Instead of 3, a collector of orphans creates the same outcome as aborted, and so does a committer that finds a newer
generation (docs/decisions/0025). Create-only means that one of them wins; the loser reads the outcome and follows it.
Any process may do 2 and 3: the merge is deterministic, so that a
roll-forward after a crash yields the same manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from msgspec import Raw, structs

from ckptstore import names
from ckptstore.commits.generations import superseded_by
from ckptstore.commits.hidden import DeletedAttempts, hidden_attempts
from ckptstore.commits.references import mark, reference_lost, referenced_attempts
from ckptstore.errors import AttemptAborted, CorruptObject, InvalidName, ObjectMissing, StoreUnavailable, Superseded
from ckptstore.format.documents import (
    FORMAT,
    JSON,
    Committed,
    Content,
    Entries,
    Manifest,
    Outcome,
    Receipt,
    ReceiptRef,
    Summary,
    digest,
)
from ckptstore.format.merging import StoredReceipt, checked, merge
from ckptstore.format.parsing import manifest_bytes, pack_manifest, parse_manifest, parse_part, seal
from ckptstore.format.statistics import health_extension
from ckptstore.names import Attempt, is_optimizer_shard, new_ulid
from ckptstore.retry import pauses, retry
from ckptstore.run import Run
from ckptstore.stores.retrying import pauses_without
from ckptstore.threads import in_parallel

OPTIMIZER_BYTES = "optimizer_bytes"
"""Extension of an outcome: the stored bytes that thinning frees."""
EARLIER = "earlier"
"""Extension of rank 0's receipt: the attempts of earlier saves of this step by its trainer, first call first."""
_CLOCK_S = 0.001
"""Between the commits of two saves of one step, should the clock be set back."""
_LOOK_AGAIN_S = 0.1
_READERS = 64
"""As many as a store has connections: at 20 ms each, 32 would read the receipts of 16,384 ranks in 10 s."""
_FEW = 4
"""Receipts that are read one after the other."""


Known = dict[tuple[str, ...], Entries]
"""Entries by their names. Most ranks name the same ones: one object stands for all equal ones."""


def write_receipt(
    run: Run,
    attempt: Attempt,
    content: Content,
    created_at: float,
    rank: int = 0,
    world_size: int = 1,
    *,
    local: Mapping[str, JSON] = {},
    metrics: Mapping[str, float] = {},
    extensions: Mapping[str, JSON] = {},
) -> StoredReceipt:
    """Write the receipt of a rank, which states that its shard is durable; the receipt is durable on return.

    created_at: when the state was captured, in seconds since the epoch. Raises Unavailable.
    """
    receipt = Receipt(
        format=FORMAT, kind="receipt", run=run.name, step=attempt.step, attempt=str(attempt), rank=rank,
        world_size=world_size, created_at=created_at, content=content, local=dict(local), metrics=dict(metrics),
        extensions=dict(extensions),
    )  # fmt: skip
    data = seal(receipt)
    run.store.put(run.keys.receipt(attempt, rank), data)
    return StoredReceipt.of(receipt, data)


def read_receipt(run: Run, attempt: Attempt, rank: int) -> Receipt:
    """The receipt of `rank`, checked. Raises ObjectMissing, CorruptObject, StoreUnavailable."""
    receipt = run.read(run.keys.receipt(attempt, rank), Receipt)
    _check_own(run, attempt, rank, receipt)
    return receipt


def read_receipts(run: Run, attempt: Attempt, ranks: Iterable[int], known: Known | None = None) -> list[StoredReceipt]:
    """The receipts of `ranks` for a merge, in that order; many are read concurrently. Raises as read_receipt.

    They have no local state. known: the entries of other receipts of the attempt, to which theirs are added.
    """
    wanted, alike = list(ranks), known if known is not None else {}
    if len(wanted) <= _FEW:
        return checked([_read_part(run, attempt, rank, alike) for rank in wanted])
    return checked(in_parallel(lambda rank: _read_part(run, attempt, rank, alike), wanted, _READERS))


def _read_part(run: Run, attempt: Attempt, rank: int, known: Known) -> tuple[Receipt, ReceiptRef]:
    key = run.keys.receipt(attempt, rank)
    data = run.store.get(key)
    receipt = parse_part(data, run.store.object_url(key))
    _check_own(run, attempt, rank, receipt)
    content, entries = receipt.content, receipt.content.entries
    alike = known.setdefault(tuple(entries.name), entries)
    content = structs.replace(content, entries=alike if alike == entries else entries)
    ref = ReceiptRef(rank=rank, digest=digest(data), bytes=len(data))
    return structs.replace(receipt, local={}, content=content), ref


def _check_own(run: Run, attempt: Attempt, rank: int, receipt: Receipt) -> None:
    if (receipt.run, receipt.attempt, receipt.rank) != (run.name, str(attempt), rank):
        url = run.store.object_url(run.keys.receipt(attempt, rank))
        raise CorruptObject(f"{url} is the receipt of another rank or attempt")


def receipt_ranks(run: Run, attempt: Attempt, among: Iterable[int] | None = None) -> set[int]:
    """The ranks that have written their receipt. among: only these matter; None: all.

    Each thousand of ranks is listed by itself, concurrently: a page of S3 has 1,000 objects, and is asked for after the
    page before it.
    """
    prefixes = [run.keys.attempt(attempt)]
    if among is not None:
        prefixes = [run.keys.thousand(attempt, number) for number in sorted({rank // 1000 for rank in among})]

    def ranks(prefix: str) -> set[int]:
        found = (names.receipt_rank(info.key) for info in run.store.list(prefix))
        return {rank for rank in found if rank is not None}

    if len(prefixes) == 1:
        return ranks(prefixes[0])
    return set().union(*in_parallel(ranks, prefixes, _READERS))


def read_outcome(run: Run, attempt: Attempt) -> Outcome | None:
    """The outcome of an attempt; None if it is not decided yet."""
    key = run.keys.outcome(attempt)
    try:
        outcome = run.read(key, Outcome)
    except ObjectMissing:
        return None
    if (outcome.run, outcome.attempt) != (run.name, str(attempt)):
        raise CorruptObject(f"{run.store.object_url(key)} is the outcome of another attempt")
    return outcome


def commit_attempt(run: Run, receipts: Sequence[StoredReceipt], newest: int | None = None) -> Outcome:
    """Merge all receipts of an attempt and commit it; the checkpoint is durable on return.

    receipts: of all ranks, in rank order. newest: the newest generation that does not supersede the attempt;
    None: its own. Idempotent, and safe from several processes. If a newer generation has begun, the attempt is aborted.
    Raises Superseded then, AttemptAborted if the attempt was aborted by another process, ReferenceLost if a checkpoint
    that it references is deleted, StoreUnavailable if the outcome could not be read: it is then unknown, and another
    call returns it.

    The last save of a step counts, in any order of commits: earlier ones that are not committed yet are aborted before.
    """
    manifest = merge(receipts)
    attempt = Attempt.parse(manifest.attempt)
    if (after := _end_earlier(run, earlier_saves(receipts[0].receipt))) is not None:
        clock = run.clock
        run = replace(run, clock=lambda: max(clock(), after + _CLOCK_S))
    # The manifest and the marks are created here, while the pool looks for a newer generation and makes the outcome's
    # parts.
    with ThreadPoolExecutor(3, thread_name_prefix="ckpt-parallel") as pool:
        # Late. If the next generation begins after this look, the checkpoint is committed, and abandoned.
        looked = pool.submit(superseded_by, run, max(attempt.generation, newest or 0))
        summarized, health = pool.submit(_summarize, manifest), pool.submit(health_extension, manifest)
        optimizer = sum(shard.stored_bytes for shard in manifest.content.shards if is_optimizer_shard(shard.name))
        data = _create_manifest(run, manifest, [shard for stored in receipts for shard in stored.shards])
        _mark_referenced(run, manifest, attempt)
    extensions = health.result() | ({OPTIMIZER_BYTES: optimizer} if optimizer else {})
    newer, summary = looked.result(), summarized.result()
    if newer is not None:
        outcome = decide(replace(run, by=_SUPERSEDED.format(newer)), attempt, None)
    else:
        outcome = decide(run, attempt, Committed(digest=digest(data), bytes=len(data), summary=summary), extensions)
    _require_committed(run, attempt, outcome)
    check_alive(run, attempt)
    return outcome


def earlier_saves(receipt: Receipt) -> list[Attempt]:
    """The attempts of earlier saves of the same step by the same trainer; only rank 0's receipt names them."""
    attempt = Attempt.parse(receipt.attempt)
    try:
        found = list(map(Attempt.parse, receipt.extension(EARLIER, list[str]) or ()))
    except InvalidName:
        return []
    return [a for a in found if (a.step, a.generation) == (attempt.step, attempt.generation) and a != attempt]


def _end_earlier(run: Run, earlier: Sequence[Attempt]) -> float | None:
    """Abort those after the newest that was committed, before which all had ended. Returns its time."""
    for attempt in reversed(earlier):
        outcome = decide(run, attempt, None)
        if outcome.committed is not None:
            return outcome.at
    return None


def end_if_superseded(run: Run, attempt: Attempt) -> None:
    """Abort the attempt if a newer generation has begun: another trainer continues the run. Raises Superseded then, or
    AttemptAborted."""
    newer = superseded_by(run, attempt.generation)
    if newer is not None:
        _require_committed(run, attempt, decide(replace(run, by=_SUPERSEDED.format(newer)), attempt, None))


def _require_committed(run: Run, attempt: Attempt, outcome: Outcome) -> None:
    if outcome.committed is None:
        raise superseded(outcome) or AttemptAborted(
            f"attempt {attempt} of run {run.name!r} was aborted by {outcome.by} before it was complete",
            "Save again. If saves take longer than the grace of the collector, increase the grace",
        )


def check_alive(run: Run, attempt: Attempt) -> None:
    """Raises AttemptAborted if a committed attempt had been deleted or aborted so long ago that this was forgotten.

    A committer that slept for weeks may create the outcome of such an attempt. No reader uses it. The look is repeated
    once: the outcome exists by now, so one lost request must not fail the save.
    """
    if retry(lambda: attempt in DeletedAttempts(run), StoreUnavailable, pauses(_LOOK_AGAIN_S, tries=2)):
        raise AttemptAborted(
            f"attempt {attempt} of run {run.name!r} was deleted or aborted before this process committed it",
            "Save again. The process or its machine was suspended, longer than deletions are remembered",
        )


def _mark_referenced(run: Run, manifest: Manifest, attempt: Attempt) -> None:
    """Keep the referenced attempts from being deleted until this attempt itself is deleted."""
    needed, optimizer = (referenced_attempts(manifest.content, of_optimizer) for of_optimizer in (False, True))
    if not needed:
        return
    mark(run, attempt, needed, optimizer)
    # In the order of a reader: the outcomes, then what is hidden.
    outcomes = {other: read_outcome(run, other) for other in needed}
    hidden = hidden_attempts(run)
    for other, outcome in outcomes.items():
        if outcome is None or outcome.committed is None or hidden.lost(other, other not in optimizer):
            raise reference_lost(run, attempt, other)


def decide(
    run: Run, attempt: Attempt, committed: Committed | None, extensions: Mapping[str, JSON] | None = None
) -> Outcome:
    """Create the outcome of an attempt, or return the existing one. Durable on return.

    The nonce distinguishes a lost reply from a lost race: after a refusal or an error the object is read back.
    """
    now = run.clock()
    proposal = Outcome(
        format=FORMAT, kind="outcome", run=run.name, step=attempt.step, attempt=str(attempt),
        committed=committed, nonce=new_ulid(now), by=run.by, at=now, extensions=dict(extensions or {}),
    )  # fmt: skip

    def once() -> Outcome:
        failure: StoreUnavailable | None = None
        try:
            if run.store.put_if_absent(run.keys.outcome(attempt), seal(proposal)):
                return proposal
        except StoreUnavailable as error:
            if run.store.retry_s:  # it has tried for long enough
                raise
            failure = error
        outcome = read_outcome(run, attempt)
        if outcome is None:
            raise failure or StoreUnavailable(
                f"cannot read the outcome of attempt {attempt} of run {run.name!r} in {run.store.url}",
                "Nothing is lost: the attempt is committed or collected when the store is available again",
            )
        return outcome

    return retry(once, StoreUnavailable, pauses_without(run.store))


def roll_forward(run: Run, attempt: Attempt) -> Outcome | None:
    """Commit an attempt whose committer died after all receipts were written. None if some are missing."""
    ranks = receipt_ranks(run, attempt)
    if not ranks:
        return None
    first = read_receipt(run, attempt, min(ranks))
    # Compare counts: a set of a hostile size does not fit into memory.
    if len(ranks) != first.world_size or max(ranks) >= len(ranks):
        return None
    return commit_attempt(run, read_receipts(run, attempt, sorted(ranks)))


def _summarize(manifest: Manifest) -> Summary:
    content = manifest.content
    return Summary(
        world_size=manifest.world_size,
        created_at=manifest.created_at,
        raw_bytes=sum(int(shard.chunks.raw.sum()) for shard in content.shards),
        stored_bytes=sum(shard.stored_bytes for shard in content.shards),
        referenced_bytes=sum(shard.referenced_bytes for shard in content.shards),
        num_entries=len(content.entries.name),
        num_shards=len(content.shards),
        metrics=manifest.metrics,
    )


def _create_manifest(run: Run, manifest: Manifest, shards: Sequence[Raw]) -> bytes:
    """The manifest's bytes in the store, created here or by another committer of the same attempt."""
    key = run.keys.manifest(Attempt.parse(manifest.attempt))
    data = pack_manifest(manifest, shards)
    if run.store.put_if_absent(key, data):
        return data
    # Another version of zstd may have compressed the same content to other bytes. The stored bytes count.
    stored = run.store.get(key)
    if stored != data and manifest_bytes(parse_manifest(stored, key)) != manifest_bytes(manifest):
        raise CorruptObject(
            f"{run.store.object_url(key)} does not match the receipts", "The attempt cannot be committed"
        )
    return stored


_MOST_CHARACTERS = 1000
_SUPERSEDED = "superseded by generation {}"
_SUPERSEDED_BY = re.compile(r"superseded by generation (\d{1,6})")
_ABORTED_BY = re.compile(r"rank (\d{1,9}) (?:skipped it|failed: (.+))", re.DOTALL)


class AbortedBy(NamedTuple):
    """The rank that aborted an attempt."""

    rank: int
    failure: str | None
    """The error on that rank; None if it skipped the attempt."""


def abort_attempt(run: Run, attempt: Attempt, rank: int, failure: str | None = None) -> None:
    """Abort an attempt; durable on return. Only for a rank that does not write its receipt.

    failure: the error; None if the rank skips the attempt. Raises StoreUnavailable if the outcome could not be written:
    the other ranks then wait until their timeout.
    """
    cause = f"failed: {failure[:_MOST_CHARACTERS]}" if failure else "skipped it"
    decide(replace(run, by=f"rank {rank} {cause}"), attempt, None)


def superseded(outcome: Outcome) -> Superseded | None:
    """The error if an attempt was aborted because a newer generation had begun."""
    match = _SUPERSEDED_BY.fullmatch(outcome.by) if outcome.committed is None else None
    if match is None:
        return None
    return Superseded(
        f"attempt {outcome.attempt} of run {outcome.run!r} was not committed: generation {match[1]} has begun",
        "Another trainer continues this run. Stop this one, or restore first to continue from what is in the store",
    )


def aborted_by(outcome: Outcome) -> AbortedBy | None:
    """The rank that aborted the attempt; None if it was committed, or aborted by another process."""
    match = _ABORTED_BY.fullmatch(outcome.by) if outcome.committed is None else None
    return AbortedBy(int(match[1]), match[2]) if match else None
