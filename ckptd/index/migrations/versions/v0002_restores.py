"""Restore sessions and their ranks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the two tables."""
    op.create_table(
        "restores",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("run", sa.String(128), nullable=False),
        sa.Column("key", sa.String(128), nullable=False),
        sa.Column("checkpoint", sa.Text, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("ttl_s", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("lease", sa.String(26)),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("num_joined", sa.BigInteger, nullable=False),
        sa.Column("num_restored", sa.BigInteger, nullable=False),
        sa.Column("done_bytes", sa.Double, nullable=False),
        sa.Column("total_bytes", sa.Double, nullable=False),
        sa.UniqueConstraint("run", "key", name="restores_one_per_key"),
    )
    op.create_table(
        "restore_ranks",
        sa.Column("restore_id", sa.String(26), sa.ForeignKey("restores.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rank", sa.BigInteger, primary_key=True),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("done_bytes", sa.BigInteger, nullable=False),
        sa.Column("total_bytes", sa.BigInteger, nullable=False),
        sa.Column("heard_at", sa.Double, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
    )
