"""Alembic's entry: runs the migrations in the transaction that ckptd.index.database opened."""

from alembic import context

from ckptd.index.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
with context.begin_transaction():
    context.run_migrations()
