"""Leases: expiring claims of readers, which keep a checkpoint from being deleted.

A reader writes its lease and then looks for a tombstone; a deleter writes its tombstone and then
looks for leases. With a store that shows every finished write to every later read, at least one of the two sees
the other and gives way.
"""

from __future__ import annotations

from collections import defaultdict

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits.catalog import hidden_attempts
from ckptstore.errors import Damaged, NoCheckpoint, ObjectMissing
from ckptstore.format.documents import FORMAT, Lease
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.names import Attempt, check_ulid, checkpoint_id, new_ulid
from ckptstore.stores import ObjectInfo, Store


def take_lease(store: Store, run: str, attempt: Attempt, holder: str, ttl_s: float, clock: Clock) -> str:
    """Protect a checkpoint for `ttl_s` seconds; the lease is durable on return. Returns its id.

    Raises NoCheckpoint if the checkpoint is being deleted.
    """
    lease = new_ulid(clock())
    renew_lease(store, run, lease, attempt, holder, ttl_s, clock)
    if attempt in hidden_attempts(store, run):
        release_lease(store, run, lease)
        raise NoCheckpoint(f"{checkpoint_id(run, attempt)} is being deleted", "Use another checkpoint")
    return lease


def renew_lease(store: Store, run: str, lease: str, attempt: Attempt, holder: str, ttl_s: float, clock: Clock) -> None:
    """Let a lease that still holds last `ttl_s` seconds from now; durable on return.

    One that has expired cannot be renewed: take another, because a deletion may have begun.
    """
    document = Lease(format=FORMAT, kind="lease", attempt=str(attempt), holder=holder, expires_at=clock() + ttl_s)
    store.put(_key(run, check_ulid(lease)), seal(document))


def release_lease(store: Store, run: str, lease: str) -> None:
    """End a lease; one that is gone already is fine."""
    store.delete_many([_key(run, check_ulid(lease))])


def active_leases(store: Store, run: str, clock: Clock) -> dict[Attempt, list[str]]:
    """Who holds which attempt now. A damaged lease holds nothing: it names no attempt that can be trusted."""
    now = clock()
    held: dict[Attempt, list[str]] = defaultdict(list)
    for info in store.list(names.leases_prefix(run)):
        lease = _read(store, info)
        if lease is not None and lease.expires_at > now:
            held[Attempt.parse(lease.attempt)].append(lease.holder)
    return dict(held)


def expired_leases(store: Store, run: str, clock: Clock) -> list[str]:
    """Keys of leases that protect nothing any more."""
    now = clock()
    listed = list(store.list(names.leases_prefix(run)))
    return [info.key for info in listed if (lease := _read(store, info)) is None or lease.expires_at <= now]


def _read(store: Store, info: ObjectInfo) -> Lease | None:
    try:
        return parse_sealed(store.get(info.key), Lease, store.object_url(info.key))
    except (Damaged, ObjectMissing):
        return None


def _key(run: str, lease: str) -> str:
    return f"{names.leases_prefix(run)}{lease}.json"
