"""Small documents next to the checkpoints: pins, fates of tombstones, scrub findings, the audit log, policies.

They are sealed and checked like all other documents (documents.py); docs/format.md specifies them. No I/O.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from ckptstore.format.documents import Document


class Pin(Document, frozen=True):
    """A named hold on a checkpoint. The object's key is the hold, so a damaged pin still protects."""

    format: int
    kind: Literal["pin"]
    attempt: str
    name: str
    by: str
    at: float
    reason: str


class Fate(Document, frozen=True):
    """The create-only decision about one tombstone: its checkpoint is deleted, or the deletion is undone."""

    format: int
    kind: Literal["fate"]
    attempt: str
    tombstone: str
    swept: bool
    by: str
    at: float


class Labels(Document, frozen=True):
    """One version of a checkpoint's tags, and of metrics that were added or corrected after its commit."""

    format: int
    kind: Literal["labels"]
    attempt: str
    version: int
    tags: dict[str, str]
    metrics: dict[str, float]
    by: str
    at: float


class ReferenceMark(Document, frozen=True):
    """States that attempt `by` references chunks of `attempt`. The object's key is the hold."""

    format: int
    kind: Literal["reference"]
    attempt: str
    by: str
    at: float


class Finding(Document, frozen=True):
    """The result of a scrub, which reads a whole checkpoint."""

    format: int
    kind: Literal["finding"]
    attempt: str
    at: float
    by: str
    num_chunks: int
    stored_bytes: int
    problems: list[str]
    """Empty if every byte is intact."""


class Action(StrEnum):
    """The actions in the audit log."""

    DELETE = "delete"
    UNDELETE = "undelete"
    SWEEP = "sweep"
    ABORT = "abort"
    PIN = "pin"
    UNPIN = "unpin"
    LABEL = "label"


class AuditRecord(Document, frozen=True):
    """An action on attempts: who, when and why. Written before the action is carried out."""

    format: int
    kind: Literal["audit"]
    action: Action
    attempts: list[str]
    by: str
    at: float
    reason: str


class Rules(Document, frozen=True):
    """A retention policy as it is stored and sent; 0 or empty: that rule is not used."""

    keep_last: int = 0
    keep_every: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_best: tuple[str, ...] = ()
    """METRIC:min:N or METRIC:max:N."""
    keep_within_s: float = 0.0
    max_bytes: int = 0


class Override(Document, frozen=True):
    """Other rules for the runs that a glob matches."""

    runs: str
    rules: Rules | None = None
    """None: they are never pruned."""


class PolicySet(Document, frozen=True):
    """What to keep of which runs. The first override that matches a run counts."""

    default: Rules | None = None
    """Rules for runs that no override matches; None: they are never pruned."""
    overrides: tuple[Override, ...] = ()
    grace_s: float = 24 * 3600.0
    """Seconds between hiding and deleting."""
    max_delete_fraction: float = 0.5
    """Largest fraction of a run's checkpoints that may be deleted at once without confirmation."""


class PoliciesVersion(Document, frozen=True):
    """One version of the policies of a store, create-only; the highest counts."""

    format: int
    kind: Literal["policies"]
    version: int
    policies: PolicySet
    by: str
    at: float
    reason: str
