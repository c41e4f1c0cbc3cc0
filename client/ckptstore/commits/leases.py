"""Leases: expiring claims of readers, which keep a checkpoint from being deleted.

A lease holds for the duration that its reader asked for, counted from the object's time in the store's listing: the
clock of the reader does not matter. A reader writes its lease and then looks for what is hidden (hidden.py); a deleter
writes its tombstone and then lists leases. On a store with read-after-write consistency, at least one of the two sees
the other and backs off.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator

from ckptstore.commits.hidden import hidden_attempts
from ckptstore.errors import CkptError, NoCheckpoint
from ckptstore.format.documents import Lease, oldest_format
from ckptstore.names import Attempt, new_ulid, ulid_time
from ckptstore.run import Run
from ckptstore.stores.checks import MAX_SKEW_S

logger = logging.getLogger(__name__)


def take_lease(run: Run, attempt: Attempt, holder: str, ttl_s: float, thinned: bool = False) -> str:
    """Protect a checkpoint for `ttl_s` seconds; the lease is durable on return. Returns its id.

    thinned: its optimizer state is not needed. Raises NoCheckpoint if the checkpoint, or optimizer state that is
    needed, is being deleted, or was deleted meanwhile.
    """
    lease = new_ulid(run.clock())
    renew_lease(run, lease, attempt, holder, ttl_s)
    if lost := hidden_attempts(run).lost(attempt, thinned):
        release_lease(run, lease)
        raise NoCheckpoint(f"{run.id_of(attempt)} is being {lost}", "Use another checkpoint")
    return lease


def renew_lease(run: Run, lease: str, attempt: Attempt, holder: str, ttl_s: float) -> None:
    """Extend an active lease to at least `ttl_s` seconds from now; durable on return.

    An expired lease must not be renewed, because a deletion may have begun: take a new one.
    """
    document = Lease(
        format=oldest_format(attempt), kind="lease", attempt=str(attempt), holder=holder, expires_at=run.clock() + ttl_s
    )
    run.write(run.keys.lease(lease), document)


def release_lease(run: Run, lease: str) -> None:
    """End a lease. Idempotent. One try: it expires anyway, and the store may be gone for good."""
    run.store.once.delete_many([run.keys.lease(lease)])


def end_lease(run: Run, lease: str) -> None:
    """Release a lease; logs a warning if that fails."""
    try:
        release_lease(run, lease)
    except CkptError as error:
        logger.warning("lease %s was not released and will expire: %s", lease, error)


def lease_holder(run: Run, lease: str) -> str | None:
    """Who took a lease; None if it is gone or damaged."""
    found = run.read_intact(run.keys.lease(lease), Lease)
    return found.holder if found is not None else None


def active_leases(run: Run) -> dict[Attempt, list[str]]:
    """The holders of unexpired leases of each attempt. A damaged lease protects nothing: its attempt is unknown."""
    held: dict[Attempt, list[str]] = defaultdict(list)
    for _, lease in _listed(run):
        if lease is not None:
            held[Attempt.parse(lease.attempt)].append(lease.holder)
    return dict(held)


def expired_leases(run: Run) -> list[str]:
    """Keys of leases that are expired or damaged."""
    return [key for key, lease in _listed(run) if lease is None]


def _listed(run: Run) -> Iterator[tuple[str, Lease | None]]:
    """The key of each lease, and its document while it is active; None if it is expired or damaged."""
    for ulid, info in run.listed_by_ulid(run.keys.leases):
        lease = run.read_intact(info.key, Lease)
        # The same clock wrote both times. A renewal does not change the ULID, so a renewed lease may last longer.
        if lease is not None and run.age_s(info.modified_at) >= lease.expires_at - ulid_time(ulid) + MAX_SKEW_S:
            lease = None
        yield info.key, lease
