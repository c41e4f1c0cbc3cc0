"""A sample of every document that lies on a store, as bytes."""

from __future__ import annotations

from typing import Any

from ckptstore.commits.commit import read_outcome
from ckptstore.format.documents import FORMAT, Generation, Lease, Tombstone
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
from tests.support.waiting import present

ATTEMPT = Attempt(7, new_ulid(1_700_000_000.0))
KEY = "somewhere/document"

_STORE = open_store("memory://documents")
_STORED = write_rank(_STORE, "gpt", ATTEMPT, sample_arrays(), metrics={"loss": 1.5})
_OUTCOME = present(read_outcome(Run(_STORE, "gpt"), write_checkpoint(_STORE, step=8).attempt))
_BY: dict[str, Any] = {"format": FORMAT, "by": "me", "at": 1.0}
_OF = _BY | {"attempt": str(ATTEMPT)}
_DOCUMENTS: list[Any] = [
    _STORED.receipt, _OUTCOME,
    Generation(**_BY, kind="generation", run="gpt", number=2, session=ATTEMPT.ulid, parent=str(ATTEMPT)),
    Lease(format=FORMAT, kind="lease", attempt=str(ATTEMPT), holder="me", expires_at=1.5),
    Tombstone(**_OF, kind="tombstone", reason="prune", grace_s=0.0),
    Pin(**_OF, kind="pin", name="paper", reason=""),
    SweepDecision(**_OF, kind="fate", tombstone=ATTEMPT.ulid, swept=True),
    Finding(**_OF, kind="finding", num_chunks=1, stored_bytes=9, problems=["a chunk is damaged"]),
    Heartbeat(
        format=FORMAT, kind="heartbeat", run="gpt", id=ATTEMPT.ulid, by="me", began_at=1.0, trains_at=2.0,
        restored_s=0.5, parent=str(ATTEMPT), generation=2, at=[3.0], step=[8], stalled_s=[0.1], slowed_s=[0.2],
        ended=TrainerEnd.DIED, ended_at=4.0,
    ),
    AuditRecord(**_BY, kind="audit", action=Action.DELETE, attempts=[str(ATTEMPT)], reason=""),
    PoliciesVersion(
        **_BY, kind="policies", version=1, reason="",
        policies=PolicySet(default=Policy(keep_last=3), overrides=(Override(runs="exp-*"),)),
    ),
]  # fmt: skip

KINDS: dict[str, Any] = {document.kind: type(document) for document in _DOCUMENTS}
SAMPLES = {document.kind: seal(document) for document in _DOCUMENTS}
SAMPLES["manifest"] = manifest_bytes(merge([_STORED])) + b"\n"
