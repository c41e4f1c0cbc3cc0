"""A sample of every document that lies on a store, as bytes."""

from __future__ import annotations

from typing import Any

from ckptstore.commits.commit import read_outcome
from ckptstore.format.documents import FORMAT, Generation, Lease, Outcome, Receipt, Tombstone
from ckptstore.format.merging import merge
from ckptstore.format.parsing import manifest_bytes, seal
from ckptstore.format.records import (
    Action,
    AuditRecord,
    Finding,
    Heartbeat,
    Override,
    Pin,
    PoliciesVersion,
    Policy,
    PolicySet,
    SweepDecision,
    TrainerEnd,
)
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, write_checkpoint, write_rank

ATTEMPT = Attempt(7, new_ulid(1_700_000_000.0))
KEY = "somewhere/document"


_GENERATION = Generation(
    format=FORMAT, kind="generation", run="gpt", number=2, session=ATTEMPT.ulid, parent=str(ATTEMPT), by="me", at=1.0
)


_HEARTBEAT = Heartbeat(
    format=FORMAT, kind="heartbeat", run="gpt", id=ATTEMPT.ulid, by="me", began_at=1.0, trains_at=2.0, restored_s=0.5,
    parent=str(ATTEMPT), generation=2, at=[3.0], step=[8], stalled_s=[0.1], slowed_s=[0.2], ended=TrainerEnd.DIED,
    ended_at=4.0,
)  # fmt: skip


def _samples() -> dict[str, bytes]:
    store = open_store("memory://documents")
    stored = write_rank(store, "gpt", ATTEMPT, sample_arrays(), metrics={"loss": 1.5})
    checkpoint = write_checkpoint(store, step=8)
    outcome = read_outcome(Run(store, "gpt"), checkpoint.attempt)
    assert outcome is not None
    return {
        "receipt": seal(stored.receipt),
        "outcome": seal(outcome),
        "generation": seal(_GENERATION),
        "lease": seal(Lease(format=FORMAT, kind="lease", attempt=str(ATTEMPT), holder="me", expires_at=1.5)),
        "tombstone": seal(
            Tombstone(
                format=FORMAT, kind="tombstone", attempt=str(ATTEMPT), by="me", at=1.0, reason="prune", grace_s=0.0
            )
        ),
        "pin": seal(Pin(format=FORMAT, kind="pin", attempt=str(ATTEMPT), name="paper", by="me", at=1.0, reason="")),
        "fate": seal(
            SweepDecision(
                format=FORMAT, kind="fate", attempt=str(ATTEMPT), tombstone=ATTEMPT.ulid, swept=True, by="me", at=1.0
            )
        ),
        "finding": seal(
            Finding(
                format=FORMAT, kind="finding", attempt=str(ATTEMPT), at=1.0, by="me", num_chunks=1, stored_bytes=9,
                problems=["a chunk is damaged"],
            )
        ),
        "heartbeat": seal(_HEARTBEAT),
        "audit": seal(
            AuditRecord(
                format=FORMAT, kind="audit", action=Action.DELETE, attempts=[str(ATTEMPT)], by="me", at=1.0, reason=""
            )
        ),
        "policies": seal(
            PoliciesVersion(
                format=FORMAT,
                kind="policies",
                version=1,
                by="me",
                at=1.0,
                reason="",
                policies=PolicySet(default=Policy(keep_last=3), overrides=(Override(runs="exp-*"),)),
            )
        ),
        "manifest": manifest_bytes(merge([stored])) + b"\n",
    }  # fmt: skip


SAMPLES = _samples()
KINDS: dict[str, Any] = {
    "receipt": Receipt, "outcome": Outcome, "lease": Lease, "tombstone": Tombstone, "pin": Pin, "fate": SweepDecision,
    "generation": Generation, "finding": Finding, "heartbeat": Heartbeat,
    "audit": AuditRecord, "policies": PoliciesVersion,
}  # fmt: skip
