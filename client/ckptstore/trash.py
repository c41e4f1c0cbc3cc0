"""What is deleted and can still be taken back."""

from __future__ import annotations

from ckptstore import names
from ckptstore.catalog import decided_attempts
from ckptstore.names import checkpoint_id
from ckptstore.stores import Store
from ckptstore.tombstones import SWEEP_GRACE_S, list_hidden, read_tombstone
from ckptstore.wire import DeletedBody


def list_deleted(store: Store, run: str) -> list[DeletedBody]:
    """The hidden checkpoints of a run whose data is still there, by falling step."""
    left = set(decided_attempts(store, run))
    swept = {names.attempt_and_name(info.key) for info in store.list(names.fates_prefix(run))}
    found = []
    for hidden in reversed(list_hidden(store, run)):
        if hidden.attempt not in left or (hidden.attempt, hidden.id) in swept:
            continue
        tombstone = read_tombstone(store, run, hidden)
        found.append(
            DeletedBody(
                id=checkpoint_id(run, hidden.attempt),
                by=tombstone.by if tombstone else "",
                at=hidden.written_at,
                reason=tombstone.reason if tombstone else "",
                until=hidden.written_at + (tombstone.grace_s if tombstone else SWEEP_GRACE_S),
            )
        )
    return found
