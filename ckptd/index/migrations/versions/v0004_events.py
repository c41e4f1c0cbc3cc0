"""The log of events, and jobs."""

import sqlalchemy as sa
from alembic import op

from ckptstore.clock import system_clock

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the two tables, and note since when the index follows its store."""
    op.add_column("origin", sa.Column("adopted_at", sa.Double, nullable=False, server_default="0"))
    op.execute(sa.update(sa.table("origin", sa.column("adopted_at"))).values(adopted_at=system_clock()))
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("run", sa.String(128)),
        sa.Column("checkpoint", sa.String(200)),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("events_of_a_run", "events", ["run", "id"])
    op.create_index("events_of_a_checkpoint", "events", ["checkpoint", "id"])
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(26), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("heard_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("ended_at", sa.Double),
        sa.Column("done", sa.Double, nullable=False),
        sa.Column("total", sa.Double, nullable=False),
        sa.Column("unit", sa.String(32), nullable=False),
        sa.Column("cancelling", sa.BigInteger, nullable=False),
        sa.Column("code", sa.String(64), nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("result", sa.Text),
        sa.Column("log", sa.Text, nullable=False),
    )
