"""Tokens: digests of secrets, and what they allow."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "tokens",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("previous", sa.String(64)),
        sa.Column("previous_until", sa.Double),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("runs", sa.Text, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("used_at", sa.Double),
    )
