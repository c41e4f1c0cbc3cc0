"""The audit log: who changed which checkpoints, when and why. One immutable object per action, kept for a year.

A record is durable before its action begins. After a crash the log may therefore contain an action that was not
carried out, but no action is missing from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckptstore.format.documents import FORMAT
from ckptstore.format.records import Action, AuditRecord
from ckptstore.names import Attempt, checkpoint_id, new_ulid, ulid_time
from ckptstore.run import Run, origin
from ckptstore.values import Record

KEPT_S = 365 * 24 * 3600.0


class AuditEntry(Record):
    """One action: who started it, on which checkpoints, when and why."""

    run: str
    action: Action
    ids: list[str]
    by: str
    at: float
    reason: str

    @staticmethod
    def of(run: str, record: AuditRecord) -> AuditEntry:
        """The entry for a stored record."""
        ids = [checkpoint_id(run, Attempt.parse(text)) for text in record.attempts]
        return AuditEntry(run=run, action=record.action, ids=ids, by=record.by, at=record.at, reason=record.reason)


def operator() -> str:
    """The person or service account of this process, for the log: user@host."""
    here = origin()
    return f"{here.user}@{here.host}"


def record(run: Run, action: Action, attempts: Iterable[Attempt], reason: str) -> None:
    """Record an action that is about to begin; durable on return."""
    now = run.clock()
    document = AuditRecord(
        format=FORMAT,
        kind="audit",
        action=action,
        attempts=[str(a) for a in attempts],
        by=run.by,
        at=now,
        reason=reason,
    )
    run.write(f"{run.keys.audit}{new_ulid(now)}.json", document)


def read_log(run: Run) -> Iterator[AuditRecord]:
    """The records of a run, newest first, read when they are asked for. Damaged ones are left out."""
    for key in sorted((info.key for info in run.store.list(run.keys.audit)), reverse=True):
        if (record := run.read_intact(key, AuditRecord)) is not None:
            yield record


def forget_old(run: Run) -> None:
    """Delete records older than a year."""
    cutoff = run.clock() - KEPT_S
    listed = run.listed_by_ulid(run.keys.audit)
    run.store.delete_many([info.key for ulid, info in listed if ulid_time(ulid) < cutoff])
