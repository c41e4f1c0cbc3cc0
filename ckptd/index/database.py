"""One database: connections, transactions, migrations. Errors become IndexUnavailable.

SQLite is configured so that readers never wait for a writer, and writers wait for each other instead of
failing: WAL, BEGIN IMMEDIATE for all writes, a busy timeout.
On PostgreSQL, which several daemons may share, readers see a snapshot as well; a writer locks the rows on
which it decides. A daemon that is stopped inside a transaction loses the transaction.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Executable,
    Table,
    create_engine,
    delete,
    event,
    or_,
    select,
    text,
)
from sqlalchemy.engine import ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from ckptstore.errors import IndexUnavailable, InvalidRequest
from ckptstore.retry import pauses, retry

_BUSY_TIMEOUT_MS = 10_000
_MIGRATIONS = Path(__file__).parent / "migrations"
_LOOK_AT_FILE = (
    "Free its disk and check its permissions, or put a copy in its place. With an empty database the daemon lists the "
    "store again, but tokens and decisions of commits exist only here: move the file, and keep it"
)
_LOOK_AT_SERVER = "Start the database server, or correct --db: the daemon then goes on by itself"
_POSTGRESQL_CONNECTIONS = 20
_POOL_TIMEOUT_S = 10
_POOL_RECYCLE_S = 300
_POSTGRESQL = {
    "connect_timeout": 5,
    "application_name": "ckptd",
    # Not a standby, nor a server that was demoted.
    "target_session_attrs": "read-write",
    # Detect a server whose host is gone.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    # Other daemons must not wait for a daemon that was stopped while it held locks.
    "options": "-c idle_in_transaction_session_timeout=10s -c lock_timeout=15s -c statement_timeout=60s",
}
_READ_ONLY_TRANSACTION = "25006"
_MIGRATION_LOCK = int.from_bytes(b"ckptd")
_TRIES = 5
_FIRST_PAUSE_S = 0.02

_P = ParamSpec("_P")
_R = TypeVar("_R")
Fence = Callable[[Connection], None]
"""Called at the beginning of a transaction; raises to prevent it."""


class _Again(IndexUnavailable):
    """The transaction was rolled back and may be retried."""


def retried(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """For a function that is one transaction: retry it after a conflict with another one, or a lost connection.

    A connection that is lost during the commit is not retried: the commit may have succeeded.
    """

    @wraps(method)
    def trying(*args: _P.args, **options: _P.kwargs) -> _R:
        return retry(lambda: method(*args, **options), _Again, pauses(_FIRST_PAUSE_S, tries=_TRIES))

    return trying


class Database:
    """Connections to one SQLAlchemy URL; use it from any thread."""

    def __init__(self, url: str, max_connections: int) -> None:
        """Connects and migrates to this version's tables. Raises InvalidRequest or IndexUnavailable."""
        try:
            parsed = make_url(url)
            self.url = parsed.render_as_string(hide_password=True)
            self.shared = parsed.get_backend_name() == "postgresql"
            """Whether other daemons may use the database as well."""
            engine = _postgresql(parsed, max_connections) if self.shared else _sqlite(parsed, max_connections)
        except ImportError as error:
            raise InvalidRequest(
                f"the driver of the database is not installed: {error}", "pip install 'ckptd[postgresql]'"
            ) from error
        except (ArgumentError, SQLAlchemyError) as error:
            raise InvalidRequest(
                f"database URL cannot be used: {error}",
                "Write sqlite:////var/lib/ckptd/index.db or postgresql+psycopg://user@host/database",
            ) from error
        self._engine = engine
        one_state = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.shared else {}
        # Whatever the default of the role or the database: what a writer reads is what others have committed.
        latest_state = {"isolation_level": "READ COMMITTED"} if self.shared else {}
        self._reading = engine.execution_options(**one_state)
        self._writing = engine.execution_options(ckptd_writes=True, **latest_state)
        self._fence: Fence | None = None
        try:
            self._migrate()
        except IndexUnavailable:
            self.close()  # the pool keeps the connection of a database that is refused
            raise

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction on a snapshot of the database."""
        try:
            with self._reading.connect() as connection, connection.begin():
                yield connection
        except SQLAlchemyError as error:
            raise self._unavailable(error, in_doubt=False) from error

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A write transaction, committed when the block ends without an exception."""
        ended = False
        try:
            with self._writing.connect() as connection, connection.begin():
                if self._fence is not None:
                    self._fence(connection)
                yield connection
                ended = True
        except SQLAlchemyError as error:
            raise self._unavailable(error, in_doubt=ended) from error

    def fenced(self, fence: Fence) -> Database:
        """The same database, whose write transactions run `fence` first."""
        other = copy.copy(self)
        other._fence = fence
        return other

    @retried
    def rows(self, query: Executable) -> Sequence[Any]:
        """The rows of one query."""
        with self.read() as connection:
            return connection.execute(query).all()

    def scalar(self, query: Executable) -> Any:
        """The first value of the first row of one query; None without rows."""
        return next((row[0] for row in self.rows(query)), None)

    @retried
    def change(self, statement: Executable) -> int:
        """Execute one statement; returns how many rows it changed."""
        with self.write() as connection:
            return connection.execute(statement).rowcount

    def forget_ended(self, table: Table, before: float, keep: int) -> None:
        """Delete the rows of a table that ended before `before`, and all but the `keep` that ended last."""
        ended_at = table.c.ended_at
        newest = select(ended_at).where(ended_at.is_not(None)).order_by(ended_at.desc())
        crowded_out = newest.offset(keep).limit(1).scalar_subquery()
        self.change(delete(table).where(or_(ended_at < before, ended_at <= crowded_out)))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @retried
    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self.write() as connection:
            if self.shared:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_MIGRATION_LOCK})"))
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise IndexUnavailable(
                    f"{self.url} was written by a newer ckptd, or by a development version: {error}",
                    "Upgrade ckptd, or name another database with --db and create the tokens again",
                ) from error

    def _unavailable(self, error: SQLAlchemyError, in_doubt: bool) -> IndexUnavailable:
        reason = str(error.__cause__ or error).splitlines()[0]
        kind = _Again if _may_be_repeated(error, in_doubt) else IndexUnavailable
        hint = _LOOK_AT_SERVER if self.shared else _LOOK_AT_FILE
        return kind(f"the index at {self.url} failed: {reason}", hint)


def _may_be_repeated(error: SQLAlchemyError, in_doubt: bool) -> bool:
    if not isinstance(error, DBAPIError) or not hasattr(error.orig, "sqlstate"):
        return False  # SQLite has waited already
    state: str | None = getattr(error.orig, "sqlstate", None)
    if state in ("40001", "40P01", "23505"):
        return True  # serialization failure, deadlock; another transaction was faster to insert the key
    # No state: the connection broke, or could not be made. 08: connection, 57P: the server ends or begins.
    lost = error.connection_invalidated or state is None or state.startswith(("08", "57P", "25P03"))
    return lost and not in_doubt


def _postgresql(url: URL, max_connections: int) -> Engine:
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    engine = create_engine(
        url,
        pool_size=min(max_connections, _POSTGRESQL_CONNECTIONS),
        max_overflow=0,
        pool_timeout=_POOL_TIMEOUT_S,
        pool_pre_ping=True,
        pool_recycle=_POOL_RECYCLE_S,
        connect_args={name: value for name, value in _POSTGRESQL.items() if name not in url.query},
    )
    event.listen(engine, "handle_error", _notice_demotion)
    return engine


def _notice_demotion(context: ExceptionContext) -> None:
    # A demoted server keeps its connections and answers SELECT 1: without this, each write would fail.
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY_TRANSACTION:
        context.is_disconnect = True


def _sqlite(url: URL, max_connections: int) -> Engine:
    if url.get_backend_name() != "sqlite":
        raise ArgumentError(f"{url.get_backend_name()} is not supported, only sqlite and postgresql")
    _prepare_file(url.database)
    engine = create_engine(url, pool_size=max_connections, max_overflow=0)
    event.listen(engine, "connect", _configure_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_file(path: str | None) -> None:
    if not path or path == ":memory:":
        raise InvalidRequest("an in-memory index is visible to one connection only", "Name a file: sqlite:///index.db")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IndexUnavailable(f"cannot create the folder of {path}: {error}", "Name another one with --db") from error


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # BEGIN is issued explicitly, below
    connection.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    if mode != "wal":
        raise IndexUnavailable(f"SQLite uses journal mode {mode!r} instead of WAL", "Put the index on a local disk")


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction fails at its first write if another one writes; an immediate one waits.
    writes = connection.get_execution_options().get("ckptd_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
