"""Live uploads: attempts that are neither committed nor aborted, with their progress."""

from __future__ import annotations

from itertools import islice

from ulid import ULID

from ckptapi.bodies import AttemptBody
from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import list_runs
from ckptstore.commits.commit import read_receipt
from ckptstore.errors import Damaged, ObjectMissing
from ckptstore.names import Attempt
from ckptstore.retention.deletion import undecided_attempts
from ckptstore.run import Run
from ckptstore.stores import Store

MAX_ATTEMPTS = 200
_MOST_MISSING = 100


def live_uploads(store: Store, clock: Clock, run: str | None) -> list[AttemptBody]:
    """The newest MAX_ATTEMPTS attempts without an outcome, of one run or all, oldest first.

    Lists the store: once per run, and once per attempt. Raises InvalidName or Unavailable.
    """
    runs = [Run(store, name, clock) for name in (list_runs(store) if run is None else [run])]
    found = [(one, attempt) for one in runs for attempt in undecided_attempts(one)]
    found.sort(key=lambda item: item[1].ulid)
    return [_look(one, attempt) for one, attempt in found[-MAX_ATTEMPTS:]]


def _look(run: Run, attempt: Attempt) -> AttemptBody:
    objects = run.objects(attempt)
    ranks = {rank for rank in (names.receipt_rank(info.key) for info in objects) if rank is not None}
    world_size = _world_size(run, attempt, ranks)
    missing = islice((rank for rank in range(world_size or 0) if rank not in ranks), _MOST_MISSING)
    begun_at = ULID.from_str(attempt.ulid).timestamp
    return AttemptBody(
        run=run.name,
        step=attempt.step,
        attempt=str(attempt),
        begun_at=begun_at,
        written_at=max((info.modified_at for info in objects), default=None),
        age_s=max(0.0, run.clock() - begun_at),
        num_receipts=len(ranks),
        world_size=world_size,
        missing_ranks=list(missing),
        num_shards=sum(info.key.endswith(".ckpt") for info in objects),
        stored_bytes=sum(info.bytes for info in objects),
    )


def _world_size(run: Run, attempt: Attempt, ranks: set[int]) -> int | None:
    if not ranks:
        return None
    try:
        return read_receipt(run, attempt, min(ranks)).world_size
    except (Damaged, ObjectMissing):
        return None  # this attempt will not be committed
