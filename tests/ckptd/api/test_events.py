from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from ckptapi import bodies
from ckptapi.bodies import EventKind, RotateRequest, Scope, TokenRequest
from ckptapi.client import DaemonClient
from ckptd.index import Database
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.daemons import Daemon, join, running_daemon
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Each test has runs of its own there."""
    return open_store(str(tmp_path_factory.mktemp("watched") / "store"))


@pytest.fixture(scope="module")
def daemon(store: Store) -> Iterator[Daemon]:
    write_checkpoint(store, "old", 1, SMALL)
    with running_daemon(store.url) as daemon:
        yield daemon


@contextmanager
def listening(
    daemon: Daemon, after: int | None = None, run: str | None = None
) -> Iterator[queue.Queue[bodies.EventBody]]:
    """What a stream brings, as it comes; the stream is open when the block begins."""
    received: queue.Queue[bodies.EventBody] = queue.Queue()
    client = DaemonClient(daemon.url)

    def follow() -> None:
        try:
            for event in client.event_stream(after, run):
                received.put(event)
        except Exception:
            pass  # the test closes the connection under it

    threading.Thread(target=follow, daemon=True).start()
    try:
        yield received
    finally:
        client.close()


def commit(daemon: Daemon, store: Store, run: str, step: int) -> str:
    """Write a checkpoint and notify the daemon; returns its id."""
    checkpoint = write_checkpoint(store, run, step, SMALL)
    with daemon.client() as client:
        client.notify(run, checkpoint.attempt)
    return checkpoint.id


def test_what_was_there_before_is_no_news(client: DaemonClient) -> None:
    assert [event for event in client.events().items if event.run == "old"] == []


def test_a_commit_is_one_event_although_it_is_notified_and_listed(daemon: Daemon, store: Store) -> None:
    with listening(daemon, run="once") as received:
        assert received.get(timeout=60).kind == bodies.OPEN
        ids = [commit(daemon, store, "once", step) for step in (1, 2, 3)]
        events = [received.get(timeout=60) for _ in ids]
        assert [event.checkpoint for event in events] == ids
        assert [event.kind for event in events] == [EventKind.COMMITTED] * 3
        assert events[0].detail["step"] == 1
        assert sorted(event.id for event in events) == [event.id for event in events]
        with daemon.client() as client:
            assert client.reindex().checkpoints >= 3
            assert [event.checkpoint for event in client.events(run="once").items] == ids


def test_a_deletion_is_an_event(daemon: Daemon, store: Store, client: DaemonClient) -> None:
    old, new = write_checkpoint(store, "gone", 1, SMALL), write_checkpoint(store, "gone", 2, SMALL)
    for checkpoint in (old, new):
        client.notify("gone", checkpoint.attempt)
    delete_checkpoint(Run(store, old.run), old.attempt, "test")
    wait_until(lambda: len(client.events(run="gone").items) == 3, "the news of the deletion")
    last = client.events(run="gone").items[-1]
    assert (last.kind, last.checkpoint) == (EventKind.DELETED, old.id)
    of_one = daemon.get(f"/v1/checkpoints/{old.id}/events").json()["items"]
    assert [event["kind"] for event in of_one] == ["committed", "deleted"]


def test_a_stream_resumes_where_it_ended(daemon: Daemon, store: Store) -> None:
    with listening(daemon, run="resumed") as received:
        received.get(timeout=60)
        commit(daemon, store, "resumed", 1)
        first = received.get(timeout=60)
    missed = [commit(daemon, store, "resumed", step) for step in (2, 3)]
    with listening(daemon, after=first.id, run="resumed") as received:
        events = [received.get(timeout=60) for _ in range(3)]
    assert ([event.checkpoint for event in events[1:]], events[0].kind) == (missed, bodies.OPEN)


def test_events_survive_a_restart_and_a_stream_goes_on(tmp_path: Path) -> None:
    store, db = open_store(str(tmp_path / "store")), f"sqlite:///{tmp_path}/index.db"
    with running_daemon(store.url, db) as daemon:
        first = commit(daemon, store, "gpt", 1)
        with daemon.client() as client:
            seen = client.events().last_id
        daemon.kill()
    second = write_checkpoint(store, "gpt", 2, SMALL).id
    with running_daemon(store.url, db) as daemon, daemon.client() as client:
        wait_until(lambda: client.events(after=seen).items, "the commit while it was away")
        assert [event.checkpoint for event in client.events().items] == [first, second]
    (tmp_path / "index.db").unlink()
    with running_daemon(store.url, db) as daemon, daemon.client() as client:
        third = commit(daemon, store, "gpt", 3)
        (event,) = client.events().items
        assert event.checkpoint == third
        assert event.id > seen
        assert client.events(after=seen).gap
        with listening(daemon, after=seen) as received:
            kinds = [received.get(timeout=60).kind for _ in range(3)]
        assert kinds == [bodies.OPEN, bodies.GAP, EventKind.COMMITTED]


def test_latest_waits_for_a_commit_and_not_longer(daemon: Daemon, store: Store) -> None:
    answers: list[httpx.Response] = []

    def ask(etag: str | None) -> None:
        headers = {"If-None-Match": etag} if etag else {}
        answers.append(daemon.get("/checkpoints/latest?run=awaited&wait=60", headers=headers, timeout=90))

    def wake(step: int, etag: str | None, number: int) -> None:
        del answers[:]
        threads = [threading.Thread(target=ask, args=(etag,)) for _ in range(number)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)  # they wait; if one does not yet, it is answered at once all the same
        assert not answers
        id = commit(daemon, store, "awaited", step)
        wait_until(lambda: len(answers) == number, "all answers", 50)  # without the commit: 60
        for thread in threads:
            thread.join()
        assert {answer.json()["id"] for answer in answers} == {id}

    wake(1, None, 5)
    # More than there are threads for such questions.
    wake(2, answers[0].headers["etag"], 40)


def test_a_wait_that_is_over_answers_as_without(daemon: Daemon, store: Store) -> None:
    assert daemon.get("/v1/checkpoints/latest?run=never&wait=0.2").json()["code"] == "no_checkpoint"
    commit(daemon, store, "still", 1)
    etag = daemon.get("/v1/checkpoints/latest?run=still").headers["etag"]
    answer = daemon.get("/v1/checkpoints/latest?run=still&wait=0.2", headers={"If-None-Match": etag})
    assert answer.status_code == 304


_ADMIN = "the bootstrap token of the test"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Store, str]]:
    """A daemon that asks for tokens, its store and the URL of its database."""
    folder = tmp_path_factory.mktemp("guarded")
    store, db = open_store(str(folder / "store")), f"sqlite:///{folder}/index.db"
    with running_daemon(store.url, db, environment={**os.environ, "CKPTD_TOKEN": _ADMIN}) as daemon:
        yield daemon, store, db


@pytest.mark.timeout(120)
@pytest.mark.parametrize("end", ["revoked", "rotated", "expired", "idle"])
def test_a_stream_ends_with_its_token(guarded: tuple[Daemon, Store, str], end: str) -> None:
    daemon, store, db = guarded
    with daemon.client(_ADMIN) as client:
        secret = client.create_token(TokenRequest(name=end, scopes=[Scope.READ])).secret
        with daemon.client(secret) as reader:
            stream = reader.event_stream()
            assert next(stream).kind == bodies.OPEN
            if end in ("revoked", "idle"):
                client.revoke_token(end)
            if end == "rotated":
                client.rotate_token(end, RotateRequest(keep_old_s=0))
            if end == "expired":
                expire(db)
                wait_until(lambda: not is_accepted(daemon, secret), "the end of the token")
            if end != "idle":
                client.notify("secret-run", write_checkpoint(store, "secret-run", 1, SMALL).attempt)
            assert list(stream) == []


def expire(db: str) -> None:
    """All tokens of a database; its daemon reads them again with each round."""
    database = Database(db, 2)
    with database.write() as connection:
        connection.execute(text("UPDATE tokens SET expires_at = 1"))
    database.close()


def is_accepted(daemon: Daemon, secret: str) -> bool:
    return daemon.get(bodies.RUNS, headers={"Authorization": f"Bearer {secret}"}).status_code == 200


def test_streams_are_limited_per_client(tmp_path: Path) -> None:
    accept = {"Accept": bodies.EVENT_STREAM}
    with running_daemon(f"file://{tmp_path}/store") as daemon:
        with ExitStack() as stack:
            opened = [httpx.stream("GET", daemon.url + bodies.EVENTS, headers=accept) for _ in range(16)]
            assert {stack.enter_context(stream).status_code for stream in opened} == {200}
            refused = daemon.get(bodies.EVENTS, headers=accept)
            assert (refused.status_code, refused.json()["code"]) == (429, "too_many_requests")
            assert int(refused.headers["retry-after"]) > 0

        def free() -> bool:
            with httpx.stream("GET", daemon.url + bodies.EVENTS, headers=accept) as stream:
                return stream.status_code == 200

        wait_until(free, "a free place for a stream")


@pytest.mark.parametrize("given", ["x", "-1", "9" * 30, "١"])
def test_positions_that_are_none(daemon: Daemon, given: str) -> None:
    headers = {"Accept": bodies.EVENT_STREAM, "Last-Event-ID": given.encode()}
    answer = httpx.get(daemon.url + bodies.EVENTS, headers=headers)  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_the_end_of_a_restore_is_one_event(daemon: Daemon, store: Store, client: DaemonClient) -> None:
    commit(daemon, store, "restored", 1)
    session = join(client, "restored", "job", world_size=1, rank=0)
    for _ in range(2):
        client.report_restore(session.id, 0, bodies.Phase.RESTORED)
    events = [event for event in client.events(run="restored").items if event.kind == EventKind.RESTORE_ENDED]
    assert [event.detail["state"] for event in events] == ["restored"]
    assert events[0].detail["restore"] == session.id
