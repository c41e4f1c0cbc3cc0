"""The first index: every table of ckptd.index.tables.

Nothing was released: until then a change of the tables changes this migration. The first later one replaces
`create_all` here by the tables as they were released.
"""

from alembic import op
from sqlalchemy import insert

from ckptd.index.tables import METADATA
from ckptd.index.tables import revision as counter

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    METADATA.create_all(op.get_bind())
    op.execute(insert(counter).values(value=0))
