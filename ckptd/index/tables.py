"""The tables of the index. The migrations create them; a test compares the two."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Enum,
    ForeignKey,
    Index,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
)

from ckptapi.bodies import CheckpointBody, JobState, Phase, RestoreState
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.decoding import decode_json

METADATA = MetaData()
_required = partial(Column, nullable=False)
"""A column without NULL."""


class _Json(TypeDecorator[Any]):
    """A value as JSON text."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: object) -> str | None:
        return None if value is None else json.dumps(value)

    def process_result_value(self, value: str | None, dialect: object) -> Any:
        return None if value is None else json.loads(value)


class _Checkpoint(TypeDecorator[Checkpoint]):
    """A checkpoint as the JSON text of its body."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Checkpoint | None, dialect: object) -> str:
        assert value is not None
        return msgspec.json.encode(CheckpointBody.of(value)).decode()

    def process_result_value(self, value: str | None, dialect: object) -> Checkpoint:
        return decode_json(value or "", CheckpointBody).checkpoint()


def _words(kind: type[StrEnum]) -> Enum:
    """One of the words of an enumeration, as text."""
    return Enum(kind, native_enum=False, length=16, values_callable=list)


origin = Table(
    "origin",
    METADATA,
    Column("url", Text, primary_key=True, comment="The store that this index is a cache of; one row"),
    _required("adopted_at", Double, server_default="0", comment="Older commits give no event"),
)

revision = Table(
    "revision",
    METADATA,
    _required("value", BigInteger, comment="Counts changes of runs; one row, locked by every writer of runs"),
)

# Sorted like the keys of the store, whatever the collation of the database.
_NAME = String(128).with_variant(String(128, collation="C"), "postgresql")

runs = Table(
    "runs",
    METADATA,
    Column("name", _NAME, primary_key=True),
    _required("version", BigInteger, comment="The revision of its last change"),
    _required("num_checkpoints", BigInteger),
    _required("stored_bytes", Double, comment="Floating point: a sum that cannot overflow"),
    Column("latest_step", BigInteger, comment="Step of the newest checkpoint that a restore may use; NULL without one"),
    Column("latest_ulid", String(26)),
    Column("latest_committed_at", Double),
)


def _run() -> Column[str]:
    return Column("run", _NAME, ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True)


def _attempt() -> list[Column[Any]]:
    return [
        _run(),
        _required("generation", BigInteger),
        Column("step", BigInteger, primary_key=True),
        Column("ulid", String(26), primary_key=True),
    ]


def _stamp() -> list[Column[Any]]:
    # Size and time in the listing before the document was read: if they change, it must be read again.
    return [Column("object_bytes", BigInteger), Column("object_modified_at", Double)]


generations = Table(
    "generations",
    METADATA,
    _run(),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", String(64), comment="NULL: none"),
    _required("readable", Boolean, comment="Otherwise its parent is unknown"),
    *_stamp(),
)

checkpoints = Table(
    "checkpoints",
    METADATA,
    *_attempt(),
    _required("state", _words(State)),
    _required("committed_at", Double),
    _required("created_at", Double),
    _required("world_size", BigInteger),
    _required("raw_bytes", BigInteger),
    _required("stored_bytes", BigInteger),
    _required("referenced_bytes", BigInteger, server_default="0"),
    _required("num_entries", BigInteger),
    _required("num_shards", BigInteger),
    _required("manifest_digest", String(32)),
    _required("manifest_bytes", BigInteger),
    _required("metrics", _Json),
    _required("tags", _Json),
    _required("problem", Text),
    _required("optimizer_bytes", BigInteger, server_default="0"),
    _required("thinned", Boolean, server_default=false()),
    Column("not_finite", BigInteger, comment="Elements that are NaN or Inf; NULL: not known"),
    Column("abandoned_at", Double, comment="By the store's clock; NULL: not abandoned, or not known"),
    Column("parent", String(64), comment="Of its generation; NULL: none, or not known"),
    *_stamp(),
    _required("labels_version", BigInteger, server_default="0", comment="0: it has none"),
)
NEWEST_FIRST = (
    checkpoints.c.run, *(checkpoints.c[name].desc() for name in ("generation", "step", "committed_at", "ulid"))
)  # fmt: skip
Index("checkpoints_newest_first", *NEWEST_FIRST)

aborted = Table(
    "aborted",
    METADATA,
    *_attempt(),
    *_stamp(),
    comment="Attempts whose outcome is aborted",
)

leaders = Table(
    "leaders",
    METADATA,
    Column("task", String(32), primary_key=True),
    _required("holder", String(300), comment="Empty without a leader"),
    _required("epoch", BigInteger, comment="Grows whenever another daemon takes over"),
    _required("renewals", BigInteger, comment="Within the epoch"),
)

tokens = Table(
    "tokens",
    METADATA,
    Column("name", String(64), primary_key=True),
    _required("digest", String(64), comment="SHA-256 of the secret"),
    Column("previous", String(64), comment="The one before it, accepted until previous_until"),
    Column("previous_until", Double),
    _required("scopes", _Json),
    _required("runs", _Json, comment="Globs"),
    _required("created_at", Double),
    _required("created_by", String(64)),
    Column("expires_at", Double),
    Column("used_at", Double),
)

decisions = Table(
    "decisions",
    METADATA,
    Column("key", String(256), primary_key=True, comment="Key of the object in the store"),
    _required("document", LargeBinary),
    _required("decided_at", Double),
    _required("stored", Boolean, comment="It was written to the store"),
    comment="Decisions for stores that overwrite on create; other stores decide themselves",
)

restores = Table(
    "restores",
    METADATA,
    Column("id", String(26), primary_key=True),
    _required("run", String(128), comment="Not a key of runs: a listing must not end a restore"),
    _required("key", String(128)),
    _required("checkpoint", _Checkpoint, comment="A copy: the checkpoint may be pruned later"),
    _required("by", String(64), comment="The name of a token"),
    _required("world_size", BigInteger),
    _required("ttl_s", Double),
    _required("created_at", Double),
    Column("lease", String(26), comment="NULL: released"),
    _required("lease_until", Double),
    _required("state", _words(RestoreState)),
    Column("ended_at", Double),
    _required("problem", Text),
    _required("num_joined", BigInteger),
    _required("num_restored", BigInteger),
    _required("done_bytes", Double, comment="Floating point: a sum that cannot overflow"),
    _required("total_bytes", Double),
    _required("host", String(255)),
    UniqueConstraint("run", "key", name="restores_one_per_key"),
)

restore_ranks = Table(
    "restore_ranks",
    METADATA,
    Column("restore_id", String(26), ForeignKey("restores.id", ondelete="CASCADE"), primary_key=True),
    Column("rank", BigInteger, primary_key=True),
    _required("phase", _words(Phase)),
    _required("done_bytes", BigInteger),
    _required("total_bytes", BigInteger),
    _required("updated_at", Double),
    _required("problem", Text),
)

events = Table(
    "events",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    _required("at", Double),
    _required("kind", String(32)),
    Column("run", String(128), comment="Not a key of runs: an event outlives its run"),
    Column("checkpoint", String(200)),
    _required("detail", _Json),
)
Index("events_of_a_run", events.c.run, events.c.id)
Index("events_of_a_checkpoint", events.c.checkpoint, events.c.id)

jobs = Table(
    "jobs",
    METADATA,
    Column("id", String(26), primary_key=True),
    _required("kind", String(32)),
    _required("request", _Json),
    _required("state", _words(JobState)),
    _required("created_at", Double),
    _required("heartbeat_at", Double, comment="The last heartbeat of the daemon that runs it"),
    Column("started_at", Double),
    Column("ended_at", Double),
    _required("done", Double),
    _required("total", Double),
    _required("unit", String(32)),
    _required("cancelling", Boolean),
    _required("code", String(64)),
    _required("problem", Text),
    Column("result", _Json),
    _required("log", Text),
)
