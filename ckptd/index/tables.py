"""The tables of the index. The migrations make them; a test compares the two."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Index, MetaData, String, Table, Text

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
