"""Small documents next to the checkpoints: pins, sweep decisions of tombstones, lists of deleted attempts, findings,
audit, policies.

They are sealed and checked like all other documents (documents.py); docs/explanation/format.md specifies them. No I/O.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec

from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import Document, StoredDocument
from ckptstore.values import Record, Value


class Pin(StoredDocument):
    """A named hold on a checkpoint. The object's key is the hold, so a damaged pin still protects."""

    kind: Literal["pin"]
    attempt: str
    name: str
    by: str
    at: float
    reason: str


class SweepDecision(StoredDocument):
    """The create-only decision about one tombstone: its checkpoint is deleted, or the deletion is undone."""

    kind: Literal["fate"]
    attempt: str
    tombstone: str
    swept: bool
    by: str
    at: float


class DeletedList(StoredDocument):
    """One version of the list of the attempts of a generation whose tombstone or aborted outcome is forgotten."""

    kind: Literal["dead"]
    generation: int
    version: Annotated[int, msgspec.Meta(ge=1, lt=10**8)]
    attempts: list[str]
    """In ascending order."""
    by: str
    at: float


class Labels(StoredDocument):
    """One version of a checkpoint's tags, and of metrics that were added or corrected after its commit."""

    kind: Literal["labels"]
    attempt: str
    version: int
    tags: dict[str, str]
    metrics: dict[str, float]
    by: str
    at: float


class ReferenceMark(StoredDocument):
    """States that attempt `by` references chunks of `attempt`. The object's key is the hold."""

    kind: Literal["reference"]
    attempt: str
    by: str
    at: float


class Finding(StoredDocument):
    """The result of a scrub, which reads a whole checkpoint, or of a restore that found damage."""

    kind: Literal["finding"]
    attempt: str
    at: float
    by: str
    num_chunks: int
    stored_bytes: int
    problems: list[str]
    """Empty if every byte is intact."""


class TrainerEnd(StrEnum):
    """How the life of a trainer ended: from its start, or a restore in place, to its end or the next restore."""

    NOT = ""
    CLOSED = "closed"
    REQUESTED = "requested"
    """As CLOSED, after a save was requested: it was preempted."""
    ERROR = "error"
    """As CLOSED, because of an exception."""
    DIED = "died"
    REWOUND = "rewound"
    """It restored in place."""


ORIGIN = "origin"
"""The extension of generations and heartbeats with an Origin."""


REVISION = "revision"
"""The extension of heartbeats with the git commit of the code, and `-dirty` if files differ from it."""


class Origin(Document, omit_defaults=True):
    """Who runs a trainer, and where. Empty: not known."""

    user: str = ""
    host: str = ""
    job: str = ""
    """The scheduler and its name for the job: slurm 4711."""
    trackers: dict[str, str] = {}
    """The runs of experiment trackers: the name of a tracker, and a URL, or a folder."""

    def __str__(self) -> str:
        return " · ".join(part for part in (f"{self.user}@{self.host}".strip("@"), self.job) if part)


LOCAL_ONLY = "local_only"
"""The extension of heartbeats with a LocalOnly."""


class LocalOnly(Document):
    """The checkpoints of a run that its saver has still to replicate to the remote store."""

    checkpoints: int
    bytes: int
    since: float | None
    """When the oldest of them was committed locally, by the clock of its committer; None: there is none."""
    at: float
    """When the saver wrote this."""
    newest: int | None = None
    """The step of the newest checkpoint in the local tier, whether it is to be replicated or not."""


class Heartbeat(StoredDocument):
    """The activity of rank 0 in one life, as of its last beat; written with each one. Columns have equal lengths."""

    kind: Literal["heartbeat"]
    run: str
    id: str
    by: str
    began_at: float
    """Start of the process, or of the restore in place."""
    trains_at: float
    """Start of training: after the restore, if there was one."""
    restored_s: float
    parent: str | None
    """The attempt of this run that it restored."""
    generation: int | None
    """The generation of its saves, once there is one."""
    at: list[float]
    """Moments, ascending."""
    step: list[int]
    """The step that was reached."""
    stalled_s: list[float]
    """Seconds that saves have held training up since `trains_at`."""
    slowed_s: list[float]
    """Seconds that steps took longer because of saves since `trains_at`."""
    ended: TrainerEnd
    ended_at: float
    """When `ended` was known; with an empty `ended` the last beat."""


class Action(StrEnum):
    """The actions in the audit log."""

    DELETE = "delete"
    THIN = "thin"
    UNDELETE = "undelete"
    SWEEP = "sweep"
    ABORT = "abort"
    PIN = "pin"
    UNPIN = "unpin"
    LABEL = "label"
    HEAL = "heal"


class AuditRecord(StoredDocument):
    """An action on attempts: who, when and why. Written before the action is carried out."""

    kind: Literal["audit"]
    action: Action
    attempts: list[str]
    by: str
    at: float
    reason: str


class Best(Value):
    """The N checkpoints with the best values of a metric."""

    metric: str
    highest: bool
    """Whether more is better."""
    count: int

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.highest else 'min'}:{self.count}"

    @staticmethod
    def parse(text: str) -> Best:
        """The text that `str` writes: METRIC:min:N or METRIC:max:N. Raises InvalidRequest."""
        metric, _, rest = text.rpartition(":")
        metric, _, direction = metric.rpartition(":")
        number = int(rest) if rest.isascii() and rest.isdigit() and len(rest) < 10 else 0
        if not metric or direction not in ("min", "max") or number < 1:
            raise InvalidRequest(f"{text!r} names no best checkpoints", "Write METRIC:min:N or METRIC:max:N")
        return Best(metric, direction == "max", number)


def about(text: str, unit: str = "", **extra: str) -> msgspec.Meta:
    """Describes a field that is an option of ckptctl.

    unit: "s", "bytes" or "count" for a number that people write with a unit.
    extra: option, metavar and default, where they do not follow from the field.
    """
    return msgspec.Meta(description=text, extra={"unit": unit, **extra})


ALL = "all"


class Policy(Document):
    """The retention rules of a run, as they are stored, sent and evaluated. A rule that is 0 or empty keeps nothing.

    Raises InvalidRequest, also when decoded, if no rule is used or a value makes no sense.
    """

    keep_last: Annotated[int, about("Keep the newest N steps of each run.", option="--keep")] = 0
    keep_every: Annotated[int, about("Keep the first step from each multiple of N on.")] = 0
    keep_hourly: Annotated[int, about("Keep the last of each of the newest N hours (UTC) that have one.")] = 0
    keep_daily: Annotated[int, about("Keep the last of each of the newest N days.")] = 0
    keep_weekly: Annotated[int, about("Keep the last of each of the newest N weeks.")] = 0
    keep_best: Annotated[
        tuple[str, ...], about("Keep the N best by a metric. Repeatable.", metavar="METRIC:min|max:N")
    ] = ()
    keep_healthy: Annotated[int, about("Keep the newest N checkpoints without NaN and Inf.")] = 0
    """Those without statistics count only if there are too few others."""
    keep_full: Annotated[int, about("Keep the newest N whole; what other rules keep loses its optimizer state.")] = 0
    keep_weights: Annotated[
        int | str, about("Keep the newest N, or all, without optimizer state.", metavar="N|all")
    ] = 0
    """A number, or `all`. With it, and without keep_full, other rules keep checkpoints whole."""
    keep_within_s: Annotated[float, about("Keep checkpoints younger than this: 90s, 30m, 24h, 7d.", "s")] = 0.0
    max_bytes: Annotated[int, about("Maximum total size to keep: 500GB, 4GiB.", "bytes")] = 0
    """A limit, not a reason: of the checkpoints that other rules keep, or of all if there is no other rule, the newest
    that fit into N stored bytes."""
    keep_abandoned_s: Annotated[
        float,
        about("Keep abandoned checkpoints for this time after they were left behind; 0s: no.", "s", default="7d"),
    ] = 7 * 24 * 3600.0
    """The other rules and the limit do not count them."""

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in self.__struct_fields__ if name != "keep_best"}
        numbers["keep_weights"] = self.most_weights
        for name, value in numbers.items():
            allowed = (int, float) if name.endswith("_s") else int
            if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < 1 << 62:
                raise InvalidRequest(f"{name} cannot be {value!r}", "Use a number from 0 on; 0: not used")
        for text in self.keep_best:
            Best.parse(text)
        del numbers["keep_abandoned_s"]  # keeps nothing of the live lineage
        if not any(numbers.values()) and not self.keep_best:
            raise InvalidRequest(
                "the policy keeps nothing", "Keep at least something: the last 1, every 1000, within a day ..."
            )

    @property
    def most_weights(self) -> int:
        """`keep_weights` as a number. Raises InvalidRequest."""
        given = self.keep_weights
        if not isinstance(given, str):
            return given
        if given != ALL and not given.isdecimal():
            raise InvalidRequest(f"keep_weights cannot be {given!r}", f"Use a number, or {ALL}")
        return (1 << 62) - 1 if given == ALL else int(given)


class Override(Document):
    """Other rules for the runs that a glob matches."""

    runs: str
    rules: Policy | None = None
    """None: they are never pruned."""
    max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Limit of the stored bytes of all these runs together; 0: none. The rules are pruned further to stay below it;
    without rules, copies and imports beyond it are refused."""


class PolicySet(Document):
    """The retention rules of all runs. The first override that matches a run counts."""

    default: Policy | None = None
    """Rules for runs that no override matches; None: they are never pruned."""
    overrides: tuple[Override, ...] = ()
    grace_s: float = 24 * 3600.0
    """Seconds between hiding and deleting."""
    max_delete_fraction: float = 0.5
    """Largest fraction of a run's checkpoints that may be deleted at once without confirmation."""


class PoliciesVersion(StoredDocument):
    """One version of the policies of a store, create-only; the highest counts."""

    kind: Literal["policies"]
    version: int
    policies: PolicySet
    by: str
    at: float
    reason: str


SAVE_COST = "save_cost"
"""Name of the extension of a receipt that has the cost of the save before it."""


class SaveCost(Record, omit_defaults=True):
    """The cost of one save for the training thread of one rank, in seconds. Kept in the receipt of the next save."""

    step: int
    stall_s: float
    """Inside save_async, and in optim.step() until the copy was done."""
    slowdown_s: float | None = None
    """The slowdown of steps while the save was under way; None if it was not measured (`ckpt.every` does)."""
