"""The tables of the index. The migrations create them; a test compares the two."""

from __future__ import annotations

import json
from enum import StrEnum
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
)

from ckptapi.bodies import CheckpointBody, JobState, Phase, RestoreState
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.decoding import decode_json

METADATA = MetaData()


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
    Column("adopted_at", Double, nullable=False, server_default="0", comment="Older commits give no event"),
)

revision = Table(
    "revision",
    METADATA,
    Column(
        "value", BigInteger, nullable=False, comment="Counts changes of runs; one row, locked by every writer of runs"
    ),
)

# Sorted like the keys of the store, whatever the collation of the database.
_NAME = String(128).with_variant(String(128, collation="C"), "postgresql")

runs = Table(
    "runs",
    METADATA,
    Column("name", _NAME, primary_key=True),
    Column("version", BigInteger, nullable=False, comment="The revision of its last change"),
    Column("num_checkpoints", BigInteger, nullable=False),
    Column("stored_bytes", Double, nullable=False, comment="Floating point: a sum that cannot overflow"),
    Column("latest_step", BigInteger, comment="Step of the newest checkpoint that a restore may use; NULL without one"),
    Column("latest_ulid", String(26)),
    Column("latest_committed_at", Double),
)


def _run() -> Column[str]:
    return Column("run", _NAME, ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True)


def _stamp() -> list[Column[Any]]:
    # Size and time in the listing before the document was read: if they change, it must be read again.
    return [Column("object_bytes", BigInteger), Column("object_modified_at", Double)]


generations = Table(
    "generations",
    METADATA,
    _run(),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("parent", String(64), comment="NULL: none"),
    Column("readable", Boolean, nullable=False, comment="Otherwise its parent is unknown"),
    *_stamp(),
)

checkpoints = Table(
    "checkpoints",
    METADATA,
    _run(),
    Column("generation", BigInteger, nullable=False),
    Column("step", BigInteger, primary_key=True),
    Column("ulid", String(26), primary_key=True),
    Column("state", _words(State), nullable=False),
    Column("committed_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("world_size", BigInteger, nullable=False),
    Column("raw_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("referenced_bytes", BigInteger, nullable=False, server_default="0"),
    Column("num_entries", BigInteger, nullable=False),
    Column("num_shards", BigInteger, nullable=False),
    Column("manifest_digest", String(32), nullable=False),
    Column("manifest_bytes", BigInteger, nullable=False),
    Column("metrics", _Json, nullable=False),
    Column("tags", _Json, nullable=False),
    Column("problem", Text, nullable=False),
    Column("not_finite", BigInteger, comment="Elements that are NaN or Inf; NULL: not known"),
    Column("abandoned_at", Double, comment="By the store's clock; NULL: not abandoned, or not known"),
    Column("parent", String(64), comment="Of its generation; NULL: none, or not known"),
    *_stamp(),
    Column("labels_version", BigInteger, nullable=False, server_default="0", comment="0: it has none"),
)
NEWEST_FIRST = (
    checkpoints.c.run, *(checkpoints.c[name].desc() for name in ("generation", "step", "committed_at", "ulid"))
)  # fmt: skip
Index("checkpoints_newest_first", *NEWEST_FIRST)

aborted = Table(
    "aborted",
    METADATA,
    _run(),
    Column("generation", BigInteger, nullable=False),
    Column("step", BigInteger, primary_key=True),
    Column("ulid", String(26), primary_key=True),
    *_stamp(),
    comment="Attempts whose outcome is aborted",
)

leaders = Table(
    "leaders",
    METADATA,
    Column("task", String(32), primary_key=True),
    Column("holder", String(300), nullable=False, comment="Empty without a leader"),
    Column("epoch", BigInteger, nullable=False, comment="Grows whenever another daemon takes over"),
    Column("renewals", BigInteger, nullable=False, comment="Within the epoch"),
)

tokens = Table(
    "tokens",
    METADATA,
    Column("name", String(64), primary_key=True),
    Column("digest", String(64), nullable=False, comment="SHA-256 of the secret"),
    Column("previous", String(64), comment="The one before it, accepted until previous_until"),
    Column("previous_until", Double),
    Column("scopes", _Json, nullable=False),
    Column("runs", _Json, nullable=False, comment="Globs"),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(64), nullable=False),
    Column("expires_at", Double),
    Column("used_at", Double),
)

decisions = Table(
    "decisions",
    METADATA,
    Column("key", String(256), primary_key=True, comment="Key of the object in the store"),
    Column("document", LargeBinary, nullable=False),
    Column("decided_at", Double, nullable=False),
    Column("stored", Boolean, nullable=False, comment="It was written to the store"),
    comment="Decisions for stores that overwrite on create; other stores decide themselves",
)

restores = Table(
    "restores",
    METADATA,
    Column("id", String(26), primary_key=True),
    Column("run", String(128), nullable=False, comment="Not a key of runs: a listing must not end a restore"),
    Column("key", String(128), nullable=False),
    Column("checkpoint", _Checkpoint, nullable=False, comment="A copy: the checkpoint may be pruned later"),
    Column("by", String(64), nullable=False, comment="The name of a token"),
    Column("world_size", BigInteger, nullable=False),
    Column("ttl_s", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("lease", String(26), comment="NULL: released"),
    Column("lease_until", Double, nullable=False),
    Column("state", _words(RestoreState), nullable=False),
    Column("ended_at", Double),
    Column("problem", Text, nullable=False),
    Column("num_joined", BigInteger, nullable=False),
    Column("num_restored", BigInteger, nullable=False),
    Column("done_bytes", Double, nullable=False, comment="Floating point: a sum that cannot overflow"),
    Column("total_bytes", Double, nullable=False),
    Column("host", String(255), nullable=False),
    UniqueConstraint("run", "key", name="restores_one_per_key"),
)

restore_ranks = Table(
    "restore_ranks",
    METADATA,
    Column("restore_id", String(26), ForeignKey("restores.id", ondelete="CASCADE"), primary_key=True),
    Column("rank", BigInteger, primary_key=True),
    Column("phase", _words(Phase), nullable=False),
    Column("done_bytes", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("problem", Text, nullable=False),
)

events = Table(
    "events",
    METADATA,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("at", Double, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("run", String(128), comment="Not a key of runs: an event outlives its run"),
    Column("checkpoint", String(200)),
    Column("detail", _Json, nullable=False),
)
Index("events_of_a_run", events.c.run, events.c.id)
Index("events_of_a_checkpoint", events.c.checkpoint, events.c.id)

jobs = Table(
    "jobs",
    METADATA,
    Column("id", String(26), primary_key=True),
    Column("kind", String(32), nullable=False),
    Column("request", _Json, nullable=False),
    Column("state", _words(JobState), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False, comment="The last heartbeat of the daemon that runs it"),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("done", Double, nullable=False),
    Column("total", Double, nullable=False),
    Column("unit", String(32), nullable=False),
    Column("cancelling", Boolean, nullable=False),
    Column("code", String(64), nullable=False),
    Column("problem", Text, nullable=False),
    Column("result", _Json),
    Column("log", Text, nullable=False),
)
