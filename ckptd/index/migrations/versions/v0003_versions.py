"""Versions and summaries of runs, stamps of outcomes, leaders. What was read of the store is read again."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Make runs, checkpoints and aborted anew; add generation and leaders."""
    for table in ("aborted", "checkpoints", "runs"):
        op.drop_table(table)
    generation = op.create_table("generation", sa.Column("value", sa.BigInteger, nullable=False))
    op.bulk_insert(generation, [{"value": 0}])
    op.create_table(
        "runs",
        sa.Column("name", _name(), primary_key=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("num_checkpoints", sa.BigInteger, nullable=False),
        sa.Column("stored_bytes", sa.Double, nullable=False),
        sa.Column("latest_step", sa.BigInteger),
        sa.Column("latest_ulid", sa.String(26)),
        sa.Column("latest_committed_at", sa.Double),
    )
    op.create_table(
        "checkpoints",
        *_attempt(),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("committed_at", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("raw_bytes", sa.BigInteger, nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_entries", sa.BigInteger, nullable=False),
        sa.Column("num_shards", sa.BigInteger, nullable=False),
        sa.Column("manifest_digest", sa.String(32), nullable=False),
        sa.Column("manifest_bytes", sa.BigInteger, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
        *_stamp(),
    )
    newest_first = [sa.text(column) for column in ("run", "step DESC", "committed_at DESC", "ulid DESC")]
    op.create_index("checkpoints_newest_first", "checkpoints", newest_first)
    op.create_table("aborted", *_attempt(), *_stamp())
    op.create_table(
        "leaders",
        sa.Column("task", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(300), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
    )


def _name() -> sa.types.TypeEngine[str]:
    return sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def _attempt() -> list[sa.Column[object]]:
    return [
        sa.Column("run", _name(), sa.ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("ulid", sa.String(26), primary_key=True),
    ]


def _stamp() -> list[sa.Column[object]]:
    return [sa.Column("outcome_bytes", sa.BigInteger), sa.Column("outcome_modified_at", sa.Double)]
