"""The first index: origin, runs, checkpoints, aborted attempts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the four tables."""
    op.create_table("origin", sa.Column("url", sa.Text, primary_key=True))
    op.create_table("runs", sa.Column("name", sa.String(128), primary_key=True))
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
    )
    op.create_index("checkpoints_newest_first", "checkpoints", ["run", "step", "committed_at", "ulid"])
    op.create_table("aborted", *_attempt())


def _attempt() -> list[sa.Column[object]]:
    return [
        sa.Column("run", sa.String(128), sa.ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("ulid", sa.String(26), primary_key=True),
    ]
