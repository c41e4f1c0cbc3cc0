"""Labels of checkpoints: tags, and which version of them was read."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Add the columns; what is in the index already has no labels until the next round of listings."""
    op.add_column("checkpoints", sa.Column("tags", sa.Text, nullable=False, server_default="{}"))
    op.add_column("checkpoints", sa.Column("labels_version", sa.BigInteger, nullable=False, server_default="0"))
