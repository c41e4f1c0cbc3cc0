"""What reading whole checkpoints came to, kept in the store: when each was last found whole, and which are damaged.

A damaged checkpoint is in quarantine: it is listed as corrupt, is never latest, and no restore takes it. One that
is found whole again leaves the quarantine.
"""

from __future__ import annotations

from ckptstore import names
from ckptstore.catalog import Checkpoint
from ckptstore.clock import Clock
from ckptstore.errors import Damaged, InvalidName, ObjectMissing
from ckptstore.format.documents import FORMAT, parse_sealed, seal
from ckptstore.format.records import Finding
from ckptstore.names import Attempt
from ckptstore.stores import Store
from ckptstore.verify import Verification


def record_finding(store: Store, result: Verification, by: str, clock: Clock) -> None:
    """Write down what a verification found; durable on return."""
    run, attempt = result.checkpoint.run, result.checkpoint.attempt
    finding = Finding(
        format=FORMAT, kind="finding", attempt=str(attempt), at=clock(), by=by,
        num_chunks=result.num_chunks, stored_bytes=result.stored_bytes, problems=list(result.problems),
    )  # fmt: skip
    whole, damaged = names.verified_key(run, attempt), names.quarantine_key(run, attempt)
    here, gone = (whole, damaged) if result.ok else (damaged, whole)
    store.put(here, seal(finding))
    store.delete_many([gone])


def verified_at(store: Store, run: str) -> dict[Attempt, float]:
    """When attempts were last found whole, by the store's clock."""
    found = {}
    for info in store.list(names.verified_prefix(run)):
        try:
            found[names.attempt_and_name(info.key)[0]] = info.modified_at
        except InvalidName:
            continue  # not ours
    return found


def read_damage(store: Store, run: str, attempt: Attempt) -> Finding | None:
    """Why a checkpoint is in quarantine; None if it is not, or if that cannot be read."""
    key = names.quarantine_key(run, attempt)
    try:
        return parse_sealed(store.get(key), Finding, store.object_url(key))
    except (Damaged, ObjectMissing):
        return None


def last_verified(store: Store, run: str, checkpoints: list[Checkpoint]) -> Attempt | None:
    """The newest of these checkpoints that was ever found whole."""
    known = verified_at(store, run)
    return max((c.attempt for c in checkpoints if c.attempt in known), default=None)
