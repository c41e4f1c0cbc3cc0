"""Leases: expiring claims of readers, which keep a checkpoint from being deleted.

A reader writes its lease and then lists tombstones; a deleter writes its tombstone and then lists leases. On a store
with read-after-write consistency, at least one of the two sees the other and backs off.
"""

from __future__ import annotations

from collections import defaultdict

from ckptstore.commits.catalog import hidden_attempts
from ckptstore.errors import Damaged, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import FORMAT, Lease
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import ObjectInfo, Store


def take_lease(run: Run, attempt: Attempt, holder: str, ttl_s: float) -> str:
    """Protect a checkpoint for `ttl_s` seconds; the lease is durable on return. Returns its id.

    Raises NoCheckpoint if the checkpoint is being deleted.
    """
    lease = new_ulid(run.clock())
    renew_lease(run, lease, attempt, holder, ttl_s)
    if attempt in hidden_attempts(run):
        release_lease(run, lease)
        raise NoCheckpoint(f"{run.id_of(attempt)} is being deleted", "Use another checkpoint")
    return lease


def renew_lease(run: Run, lease: str, attempt: Attempt, holder: str, ttl_s: float) -> None:
    """Extend an active lease to `ttl_s` seconds from now; durable on return.

    An expired lease must not be renewed, because a deletion may have begun: take a new one.
    """
    document = Lease(format=FORMAT, kind="lease", attempt=str(attempt), holder=holder, expires_at=run.clock() + ttl_s)
    run.store.put(run.keys.lease(lease), seal(document))


def release_lease(run: Run, lease: str) -> None:
    """End a lease. Idempotent."""
    run.store.delete_many([run.keys.lease(lease)])


def active_leases(run: Run) -> dict[Attempt, list[str]]:
    """The holders of unexpired leases of each attempt. A damaged lease protects nothing: its attempt is unknown."""
    now = run.clock()
    held: dict[Attempt, list[str]] = defaultdict(list)
    for info in run.store.list(run.keys.leases):
        lease = _read(run.store, info)
        if lease is not None and lease.expires_at > now:
            held[Attempt.parse(lease.attempt)].append(lease.holder)
    return dict(held)


def expired_leases(run: Run) -> list[str]:
    """Keys of leases that are expired or damaged."""
    now = run.clock()
    listed = list(run.store.list(run.keys.leases))
    return [info.key for info in listed if (lease := _read(run.store, info)) is None or lease.expires_at <= now]


def _read(store: Store, info: ObjectInfo) -> Lease | None:
    try:
        return parse_sealed(store.get(info.key), Lease, store.object_url(info.key))
    except (Damaged, ObjectMissing):
        return None
