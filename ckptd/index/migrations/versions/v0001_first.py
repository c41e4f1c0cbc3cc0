"""The first index."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    _create_listings()
    _create_leaders_tokens_decisions()
    _create_restores()
    _create_events_and_jobs()


def _create_listings() -> None:
    op.create_table(
        "origin",
        sa.Column("url", sa.Text, primary_key=True),
        sa.Column("adopted_at", sa.Double, nullable=False, server_default="0"),
    )
    revision = op.create_table("revision", sa.Column("value", sa.BigInteger, nullable=False))
    op.bulk_insert(revision, [{"value": 0}])
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
        "generations",
        _run(),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.String(64)),
        sa.Column("readable", sa.Boolean, nullable=False),
        *_stamp(),
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
        sa.Column("referenced_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("num_entries", sa.BigInteger, nullable=False),
        sa.Column("num_shards", sa.BigInteger, nullable=False),
        sa.Column("manifest_digest", sa.String(32), nullable=False),
        sa.Column("manifest_bytes", sa.BigInteger, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("tags", sa.Text, nullable=False, server_default="{}"),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("not_finite", sa.BigInteger),
        sa.Column("abandoned_at", sa.Double),
        sa.Column("parent", sa.String(64)),
        *_stamp(),
        sa.Column("labels_version", sa.BigInteger, nullable=False, server_default="0"),
    )
    newest_first = ("run", "generation DESC", "step DESC", "committed_at DESC", "ulid DESC")
    op.create_index("checkpoints_newest_first", "checkpoints", list(map(sa.text, newest_first)))
    op.create_table("aborted", *_attempt(), *_stamp())


def _create_leaders_tokens_decisions() -> None:
    op.create_table(
        "leaders",
        sa.Column("task", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(300), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("renewals", sa.BigInteger, nullable=False),
    )
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
    op.create_table(
        "decisions",
        sa.Column("key", sa.String(256), primary_key=True),
        sa.Column("document", sa.LargeBinary, nullable=False),
        sa.Column("decided_at", sa.Double, nullable=False),
        sa.Column("stored", sa.Boolean, nullable=False),
    )


def _create_restores() -> None:
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
        sa.Column("host", sa.String(255), nullable=False),
        sa.UniqueConstraint("run", "key", name="restores_one_per_key"),
    )
    op.create_table(
        "restore_ranks",
        sa.Column("restore_id", sa.String(26), sa.ForeignKey("restores.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("rank", sa.BigInteger, primary_key=True),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("done_bytes", sa.BigInteger, nullable=False),
        sa.Column("total_bytes", sa.BigInteger, nullable=False),
        sa.Column("reported_at", sa.Double, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
    )


def _create_events_and_jobs() -> None:
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
        sa.Column("heartbeat_at", sa.Double, nullable=False),
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


def _name() -> sa.types.TypeEngine[str]:
    return sa.String(128).with_variant(sa.String(128, collation="C"), "postgresql")


def _run() -> sa.Column[object]:
    return sa.Column("run", _name(), sa.ForeignKey("runs.name", ondelete="CASCADE"), primary_key=True)


def _attempt() -> list[sa.Column[object]]:
    return [
        _run(),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, primary_key=True),
        sa.Column("ulid", sa.String(26), primary_key=True),
    ]


def _stamp() -> list[sa.Column[object]]:
    return [sa.Column("object_bytes", sa.BigInteger), sa.Column("object_modified_at", sa.Double)]
