"""The database: its schema, several writers, and files that it refuses."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from msgspec import structs
from sqlalchemy import insert, text

from ckptapi.client import DaemonClient
from ckptd.index import Database, Decision, DecisionIndex, Index, Restore, RestoreIndex
from ckptd.index.leaders import LeaderIndex
from ckptd.index.tables import METADATA, decisions, leaders, restores, tokens
from ckptd.index.tokens import Token, TokenIndex
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CkptError, Conflict, IndexUnavailable, InvalidRequest
from ckptstore.names import Attempt, new_ulid
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import on_both
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.ports import free_port
from tests.support.postgresql import PostgresqlServer
from tests.support.waiting import wait_until


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


@pytest.mark.parametrize(
    ("newer", "says"), [(False, "tokens and decisions of commits exist only here"), (True, "newer ckptd")]
)
def test_a_file_that_is_no_database_of_ours_is_named(tmp_path: Path, newer: bool, says: str) -> None:
    file = tmp_path / "index.db"
    if newer:
        Database(f"sqlite:///{file}", 2).close()
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
    else:
        file.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    with pytest.raises(IndexUnavailable, match=says) as caught:
        Database(f"sqlite:///{file}", 2)
    assert "delete" not in str(caught.value)
    assert file not in _open_files()  # also not while its error is kept


def _open_files() -> Iterator[Path]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            yield descriptor.readlink()


def _database(url: str, **options: str) -> Database:
    """As a role or a database with these default settings would have it."""
    settings = " ".join(f"-c {name}={value}" for name, value in options.items())
    return Database(f"{url}?options={quote(settings)}", 5)


@pytest.mark.parametrize("level", [r"read\ committed", r"repeatable\ read", "serializable"])
def test_who_comes_later_is_told_what_was_first(postgresql_database: str, level: str) -> None:
    first, later = (_database(postgresql_database, default_transaction_isolation=level) for _ in range(2))
    restore = Restore(
        id="1", run="gpt", key="job", checkpoint=Checkpoint("gpt", Attempt(1, new_ulid(0)), State.COMMITTED), by="a",
        world_size=1, ttl_s=1, created_at=1, lease=None, lease_until=0,
    )  # fmt: skip
    token = Token(name="a", digest="1", scopes=frozenset(), runs=(), created_at=1, created_by="a", expires_at=None)
    with ThreadPoolExecutor(4) as pool:
        with first.write() as connection:
            connection.execute(insert(decisions).values(key="k", document=b"aborted", decided_at=1, stored=False))
            connection.execute(insert(restores).values(structs.asdict(restore)))
            connection.execute(insert(tokens).values({**asdict(token), "scopes": []}))
            connection.execute(insert(leaders).values(task="t", holder="a", epoch=1, renewals=0))
            decided = pool.submit(DecisionIndex(later).create, Decision("k", b"committed", 2, False))
            joined = pool.submit(RestoreIndex(later).create, structs.replace(restore, id="2"))
            named = pool.submit(TokenIndex(later).create, replace(token, digest="2"))
            led = pool.submit(LeaderIndex(later, "t").look)
            blocked = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
            wait_until(lambda: connection.scalar(blocked) == 4, "four that wait")
        assert decided.result().document == b"aborted"
        assert joined.result().id == "1"
        assert isinstance(named.exception(), Conflict)
        assert led.result().holder == "a"
    first.close()
    later.close()


def test_a_demoted_server_is_left_for_the_one_that_takes_writes(
    postgresql_database: str, postgresql_server: PostgresqlServer
) -> None:
    with pytest.raises(IndexUnavailable, match="read-only") as caught:
        _database(postgresql_database, default_transaction_read_only="on")
    assert "delete" not in str(caught.value)
    name = postgresql_database.rsplit("/", 1)[1]
    hosts = f"host=127.0.0.1:{free_port()}&host=127.0.0.1:{postgresql_server.port}"
    database = Database(f"postgresql://ckptd@/{name}?{hosts}", 5)
    index = DecisionIndex(database)
    with ExitStack() as stack:
        for _ in range(3):  # its connections stay, and answer
            connection = stack.enter_context(database.read())
            connection.execute(text("SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY"))
    for key in "ab":
        assert index.create(Decision(key, b"x", 1, False)).key == key
    assert database.scalar(text("SELECT 1")) == 1
    database.close()


# They learn from each other, not from the store.
_RARELY = ("--poll-seconds", "600")
_WAIT_S = 60
_SOON_S = 50.0
"""A daemon that is not woken answers when the wait is over."""


@contextmanager
def _two(store: Store, postgresql_database: str, *options: str) -> Iterator[tuple[Daemon, Daemon]]:
    def start(_: int) -> Daemon:
        return stack.enter_context(running_daemon(store.url, postgresql_database, options=options))

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
        yield first, second


def test_a_change_seen_by_one_daemon_is_served_by_both(store: Store, postgresql_database: str) -> None:
    """They also start at the same time, on a database without tables."""
    write_checkpoint(store, step=1, arrays={})
    with _two(store, postgresql_database, *_RARELY) as (first, second), first.client() as client:
        assert second.get("/v1/checkpoints/latest?run=gpt").json()["step"] == 1
        told: list[httpx.Response] = []
        etag = second.get("/v1/checkpoints/latest?run=gpt").headers["etag"]
        options = {"headers": {"If-None-Match": etag}, "timeout": 90}
        waiting = threading.Thread(
            target=lambda: told.append(second.get(f"/v1/checkpoints/latest?run=gpt&wait={_WAIT_S}", **options))
        )
        waiting.start()
        wait_until(second.waiting_requests, "the request that waits")
        newest = write_checkpoint(store, step=2, arrays={})
        client.notify("gpt", newest.attempt)
        wait_until(lambda: told, "the answer", _SOON_S)
        waiting.join()
        assert told[0].json()["step"] == 2
        delete_checkpoint(Run(store, newest.run), newest.attempt, "test", force=True)
        assert first.post("/v1/reindex").status_code == 200
        wait_until(lambda: second.get("/checkpoints/latest").json()["step"] == 1, "hearing of a deletion", _SOON_S)


def test_ranks_of_one_restore_may_ask_different_daemons(store: Store, postgresql_database: str) -> None:
    write_checkpoint(store, step=1, arrays={})
    with _two(store, postgresql_database, *_RARELY) as (first, second):
        ids = set()
        for rank, daemon in enumerate((first, second)):
            body = {"run": "gpt", "key": "job-1", "rank": rank, "world_size": 2, "ttl_s": 60.0}
            answer = daemon.post("/v1/restores", body)
            assert answer.is_success, answer.text
            ids.add(answer.json()["id"])
        (id,) = ids
        ended: list[httpx.Response] = []
        path = f"/v1/restores/{id}?wait={_WAIT_S}"
        waiting = threading.Thread(target=lambda: ended.append(second.get(path, timeout=90)))
        waiting.start()
        said = {"phase": "restored", "done_bytes": 1, "total_bytes": 1}
        for rank in range(2):
            report = httpx.put(f"{first.url}/v1/restores/{id}/ranks/{rank}", json=said, timeout=60)
            assert report.status_code == 200
        wait_until(lambda: ended, "the answer", _SOON_S)
        waiting.join()
        assert ended[0].json()["state"] == "restored"
        wait_until(lambda: not list(store.list("gpt/leases/")), "releasing the lease")


def test_daemons_of_two_stores_do_not_share_a_database(postgresql_database: str) -> None:
    index = Database(postgresql_database, 2)
    Index(index).adopt("file:///one", 0.0)
    with pytest.raises(InvalidRequest, match="one database per store"):
        Index(index).adopt("file:///another", 0.0)
    Index(index).adopt("file:///one", 0.0)
    index.close()


def test_a_database_restart_costs_only_time(
    store: Store, postgresql_database: str, postgresql_server: PostgresqlServer
) -> None:
    write_checkpoint(store, step=0, arrays={})
    statuses: set[int] = set()
    saved = [0]
    ended = threading.Event()

    def ask(daemon: Daemon) -> None:
        with httpx.Client(base_url=daemon.url, timeout=60) as client:
            while not ended.is_set():
                statuses.add(client.get("/v1/checkpoints?run=gpt").status_code)

    def save(daemon: Daemon) -> None:
        with daemon.client() as client:
            while not ended.is_set():
                _notify(client, store, saved[-1] + 1)
                saved.append(saved[-1] + 1)
                time.sleep(0.02)

    def worked(steps: int) -> bool:
        return 200 in statuses and saved[-1] > steps

    with _two(store, postgresql_database, "--leader-lease-seconds", "2") as daemons, ThreadPoolExecutor(4) as pool:
        working = [*(pool.submit(ask, daemon) for daemon in daemons), pool.submit(save, daemons[0])]
        try:
            for stop in range(1, 3):
                statuses.clear()
                wait_until(partial(worked, 5 * stop), "work")
                postgresql_server.stop()
                wait_until(lambda: 503 in statuses, "answers without a database")
                postgresql_server.start()
                wait_until(lambda: all(d.get("/readyz").status_code == 200 for d in daemons), "recovering")
                assert statuses == {200, 503}
        finally:
            ended.set()
        for future in working:
            future.result()
        last = saved[-1]
        for daemon in daemons:
            with daemon.client() as client:
                wait_until(partial(_knows, client, last + 1), "knowing all commits")
            assert "Traceback" not in daemon.log()


def _knows(client: DaemonClient, count: int) -> bool:
    return len(client.checkpoints("gpt")) == count


def _notify(client: DaemonClient, store: Store, step: int) -> None:
    try:
        client.notify("gpt", write_checkpoint(store, step=step, arrays={}).attempt)
    except CkptError:
        pass  # the database is away: a listing finds the commit
