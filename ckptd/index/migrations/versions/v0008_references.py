"""References: how many stored bytes of earlier checkpoints a checkpoint needs."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    """Add the column; nothing in the store referenced anything before."""
    op.add_column("checkpoints", sa.Column("referenced_bytes", sa.BigInteger, nullable=False, server_default="0"))
