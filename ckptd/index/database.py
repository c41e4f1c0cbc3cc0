"""One database: connections, transactions, migrations. Errors become IndexUnavailable.

SQLite is set up so that readers never wait for a writer and two writers wait for each other
instead of failing: WAL, BEGIN IMMEDIATE for everything that writes, a busy time-out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from ckptstore.errors import IndexUnavailable, InvalidRequest

_BUSY_TIMEOUT_MS = 10_000
_MIGRATIONS = Path(__file__).parent / "migrations"
_DISPOSABLE = "The index is a cache: delete the database and start again, nothing is lost"


class Database:
    """Connections to one SQLAlchemy URL; use it from any thread."""

    def __init__(self, url: str, max_connections: int) -> None:
        """Connects and migrates to this version's tables. Raises InvalidRequest or IndexUnavailable."""
        try:
            parsed = make_url(url)
            self.url = parsed.render_as_string(hide_password=True)
            sqlite = parsed.get_backend_name() == "sqlite"
            if sqlite:
                _prepare_file(parsed.database)
            self._engine = create_engine(parsed, pool_size=max_connections, max_overflow=0, pool_pre_ping=not sqlite)
        except (ArgumentError, ImportError, SQLAlchemyError) as error:
            raise InvalidRequest(
                f"database URL cannot be used: {error}",
                "Write sqlite:////var/lib/ckptd/index.db, or install the driver of your database",
            ) from error
        if sqlite:
            event.listen(self._engine, "connect", _configure_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)
        self._migrate()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database."""
        with self._errors(), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that changes the database, committed when the block ends normally."""
        with self._errors(), self._engine.connect() as connection:
            writing = connection.execution_options(ckptd_writes=True)
            with writing.begin():
                yield writing

    def ping(self) -> None:
        """Raises IndexUnavailable if the database does not answer."""
        with self.read() as connection:
            connection.execute(text("SELECT 1"))

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(_MIGRATIONS))
        with self.write() as connection:
            config.attributes["connection"] = connection
            try:
                command.upgrade(config, "head")
            except CommandError as error:
                raise IndexUnavailable(
                    f"{self.url} was written by a newer ckptd: {error}", f"Upgrade ckptd. {_DISPOSABLE}"
                ) from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise IndexUnavailable(f"the index at {self.url} failed: {reason}", _DISPOSABLE) from error


def _prepare_file(path: str | None) -> None:
    if not path or path == ":memory:":
        raise InvalidRequest("an index in memory is visible to one connection only", "Name a file: sqlite:///index.db")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IndexUnavailable(f"cannot make the folder of {path}: {error}", "Name another one with --db") from error


def _configure_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    mode = cursor.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()
    if mode != "wal":
        raise IndexUnavailable(
            f"SQLite answered journal mode {mode!r} where WAL was asked for", "Put the index on a local disk"
        )


def _begin_sqlite(connection: Connection) -> None:
    # A deferred transaction that turns into a writer fails at once where an immediate one waits.
    writes = connection.get_execution_options().get("ckptd_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
