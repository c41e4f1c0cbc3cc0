"""The tables of the index. The migrations make them; a test compares the two."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, MetaData, String, Table, Text, UniqueConstraint

METADATA = MetaData()

origin = Table(
    "origin",
    METADATA,
    Column("url", Text, primary_key=True, comment="The store that this index is a cache of; one row"),
)

runs = Table("runs", METADATA, Column("name", String(128), primary_key=True))


def _run() -> Column[str]:
    return Column("run", String(128), ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True)


checkpoints = Table(
    "checkpoints",
    METADATA,
    _run(),
    Column("step", BigInteger, primary_key=True),
    Column("ulid", String(26), primary_key=True),
    Column("state", String(16), nullable=False),
    Column("committed_at", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("world_size", BigInteger, nullable=False),
    Column("raw_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("num_entries", BigInteger, nullable=False),
    Column("num_shards", BigInteger, nullable=False),
    Column("manifest_digest", String(32), nullable=False),
    Column("manifest_bytes", BigInteger, nullable=False),
    Column("metrics", Text, nullable=False, comment="JSON"),
    Column("problem", Text, nullable=False),
)
Index("checkpoints_newest_first", *(checkpoints.c[name] for name in ("run", "step", "committed_at", "ulid")))

aborted = Table(
    "aborted",
    METADATA,
    _run(),
    Column("step", BigInteger, primary_key=True),
    Column("ulid", String(26), primary_key=True),
    comment="Attempts whose outcome was read and says aborted: never read again",
)

restores = Table(
    "restores",
    METADATA,
    Column("id", String(26), primary_key=True),
    Column("run", String(128), nullable=False, comment="Not a key of runs: a listing must not end a restore"),
    Column("key", String(128), nullable=False),
    Column("checkpoint", Text, nullable=False, comment="JSON; the checkpoint itself may be pruned later"),
    Column("world_size", BigInteger, nullable=False),
    Column("ttl_s", Double, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("lease", String(26), comment="NULL: released"),
    Column("lease_until", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("ended_at", Double),
    Column("problem", Text, nullable=False),
    Column("num_joined", BigInteger, nullable=False),
    Column("num_restored", BigInteger, nullable=False),
    Column("done_bytes", Double, nullable=False, comment="Floating point: a sum that cannot overflow"),
    Column("total_bytes", Double, nullable=False),
    UniqueConstraint("run", "key", name="restores_one_per_key"),
)

restore_ranks = Table(
    "restore_ranks",
    METADATA,
    Column("restore_id", String(26), ForeignKey("restores.id", ondelete="CASCADE"), primary_key=True),
    Column("rank", BigInteger, primary_key=True),
    Column("phase", String(16), nullable=False),
    Column("done_bytes", BigInteger, nullable=False),
    Column("total_bytes", BigInteger, nullable=False),
    Column("heard_at", Double, nullable=False),
    Column("problem", Text, nullable=False),
)
