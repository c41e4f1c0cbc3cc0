"""Decisions that the store cannot make itself."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "decisions",
        sa.Column("key", sa.String(256), primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.Column("stored", sa.Boolean, nullable=False),
    )
