"""Commit: the receipt of this rank, then the checkpoint of all ranks. Uses no collective.

Rank 0 polls the store for the receipts of the other ranks, which poll it for the outcome.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from ckpt.saver.deriving import Derived, in_stream
from ckpt.saver.messages import SaveJob, Setup
from ckptstore.commits.commit import (
    StoredReceipt,
    abort_attempt,
    aborted_by,
    commit_attempt,
    read_outcome,
    read_receipt,
    receipt_ranks,
)
from ckptstore.errors import AttemptAborted, CkptError, RankFailed, ReceiptsMissing, SaveSkipped
from ckptstore.format.documents import FORMAT, Content, Outcome, Receipt, Shard
from ckptstore.format.parsing import seal
from ckptstore.format.shards import Placed, slice_tables
from ckptstore.names import Attempt
from ckptstore.retry import pauses, poll
from ckptstore.run import Run

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_WAIT_S = 0.02
_LONGEST_WAIT_S = 2.0


def write_receipt(
    run: Run, setup: Setup, job: SaveJob, placed: list[Placed], derived: list[Derived], shard: Shard | None
) -> StoredReceipt:
    """Write the receipt, which states that this rank's shard is durable; the receipt is durable on return."""
    shards = [shard] if shard is not None else []
    entries, slices = slice_tables(*in_stream(placed, derived))
    receipt = Receipt(
        format=FORMAT,
        kind="receipt",
        run=run.name,
        step=job.attempt.step,
        attempt=str(job.attempt),
        rank=setup.rank,
        world_size=setup.world_size,
        created_at=job.created_at,
        content=Content(shards=shards, entries=entries, slices=slices, aliases=job.aliases, trees=job.trees),
        local=job.local,
        metrics=job.metrics,
    )
    data = seal(receipt)
    run.store.put(run.keys.receipt(job.attempt, setup.rank), data)
    return StoredReceipt(receipt, data)


def commit(run: Run, setup: Setup, attempt: Attempt, own: StoredReceipt) -> Outcome:
    """Commit the attempt, or on ranks other than 0 wait until it is committed; the checkpoint exists on return.

    Raises ReceiptsMissing if ranks are not done within the timeout, SaveSkipped if a rank skipped the attempt,
    RankFailed if a rank aborted it after an error, AttemptAborted if a collector aborted it.
    """
    if setup.rank == 0:
        receipts = _all_receipts(run, setup, own, attempt)
        if receipts is not None:
            return commit_attempt(run, receipts)
    outcome = _wait(lambda: read_outcome(run, attempt), setup.commit_timeout_s)
    if outcome is None:
        raise ReceiptsMissing(
            f"attempt {attempt} of run {setup.run!r} was not committed within {setup.commit_timeout_s:.0f} s",
            "Check rank 0: its saver commits for all ranks",
        )
    if outcome.committed is None:
        raise _aborted(setup.run, attempt, outcome)
    return outcome


def _aborted(run: str, attempt: Attempt, outcome: Outcome) -> CkptError:
    abort = aborted_by(outcome)
    if abort is None:
        return AttemptAborted(f"attempt {attempt} of run {run!r} was aborted by {outcome.by}", "Save again")
    step = f"step {attempt.step} of run {run!r}"
    if abort.failure is None:
        return SaveSkipped(f"{step} was skipped by rank {abort.rank}, which was busy with earlier saves")
    return RankFailed(
        f"rank {abort.rank} could not save {step}: {abort.failure}",
        "Check that rank. Nothing was committed, and earlier checkpoints are unchanged",
    )


def abort_attempts(run: Run, rank: int, attempts: Iterable[Attempt], failure: str | None) -> None:
    """Abort attempts that this rank takes no part in, so that the other ranks do not wait for it. Never raises.

    failure: what went wrong on this rank; None if it skips the attempts.
    """
    try:
        for attempt in attempts:
            abort_attempt(run, attempt, rank, failure)
    except CkptError as error:
        logger.warning("could not abort the attempt; other ranks will wait until their timeout: %s", error)


def describe(error: BaseException) -> str:
    """The message about an error for other ranks."""
    return f"{error.code}: {error.message}" if isinstance(error, CkptError) else f"{type(error).__name__}: {error}"


def _all_receipts(run: Run, setup: Setup, own: StoredReceipt, attempt: Attempt) -> list[StoredReceipt] | None:
    """The receipts of all ranks, in rank order; None if the attempt already has an outcome."""
    world = set(range(setup.world_size))
    if world == {0}:
        return [own]
    present: set[int] = set()

    def complete() -> bool | Outcome | None:
        present.update(receipt_ranks(run, attempt))
        return present >= world or read_outcome(run, attempt)

    answer = _wait(complete, setup.commit_timeout_s)
    if isinstance(answer, Outcome):
        return None
    if not answer:
        missing = sorted(world - present)
        raise ReceiptsMissing(
            f"ranks {missing[:8]} of {setup.world_size} did not finish attempt {attempt} of run {setup.run!r} "
            f"within {setup.commit_timeout_s:.0f} s",
            "Check those ranks. Nothing was committed, and earlier checkpoints are unchanged",
        )
    return [own, *(read_receipt(run, attempt, rank) for rank in sorted(world - {0}))]


def _wait(ask: Callable[[], _T], timeout_s: float) -> _T:
    """Poll until the answer is true or the time is up; returns the last answer."""
    return poll(ask, pauses(_FIRST_WAIT_S, _LONGEST_WAIT_S, factor=1.5, timeout_s=timeout_s, jitter=False))
