"""The database: its schema, several writers, and files that it refuses."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from ckptd.index import Database, Index
from ckptd.index.tables import METADATA
from ckptstore.errors import IndexUnavailable
from tests.conftest import DATABASE_KINDS

on_both = pytest.mark.parametrize("db_url", DATABASE_KINDS, indirect=True)


@pytest.fixture
def database(db_url: str) -> Iterator[Database]:
    database = Database(db_url, 20)
    yield database
    database.close()


@on_both
def test_the_migrations_make_the_tables(database: Database) -> None:
    with database.read() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)
    assert [difference for difference in differences if "comment" not in str(difference)] == []


def test_sqlite_is_set_up_for_readers_beside_a_writer(database: Database) -> None:
    with database.read() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "foreign_keys")]
    assert pragmas == ["wal", 1]
    with database.write() as writer:
        writer.exec_driver_sql("INSERT INTO runs VALUES ('unfinished', 1, 0, 0, NULL, NULL, NULL)")
        assert Index(database).versions() == {}
    assert Index(database).versions() == {"unfinished": 1}


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.db").write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(IndexUnavailable, match="delete the database"):
        Database(f"sqlite:///{tmp_path / 'index.db'}", 2)


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Database(f"sqlite:///{tmp_path / 'index.db'}", 2).close()
    with sqlite3.connect(tmp_path / "index.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(IndexUnavailable, match="newer ckptd"):
        Database(f"sqlite:///{tmp_path / 'index.db'}", 2)
