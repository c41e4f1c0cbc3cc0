"""Webhooks against a receiver with prepared answers: signed, tried again, bounded, never redirected."""

from __future__ import annotations

import hmac
import json
import os
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ckptapi.bodies import EventBody, EventKind
from ckptd.housekeeping.webhooks import QUEUED, TRIES, Webhooks
from ckptd.metrics import Metrics
from ckptstore.errors import InvalidRequest
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

SECRET = "correct horse battery"


class Receiver:
    """Takes posts, and answers with the statuses it is given, then 200."""

    def __init__(self) -> None:
        self.posts: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.posts.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(receiver.statuses.pop(0) if receiver.statuses else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook"
        threading.Thread(target=self._server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.posts]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def events(count: int, kind: EventKind = EventKind.COMMITTED) -> list[EventBody]:
    return [
        EventBody(id=1000 + number, at=5.0, kind=kind, run="gpt", detail={"step": number}) for number in range(count)
    ]


def outcomes(metrics: Metrics) -> dict[str, float]:
    (family,) = metrics.webhooks.collect()
    return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}


@pytest.fixture
def posting(receiver: Receiver) -> Iterator[tuple[Webhooks, Metrics, list[float]]]:
    """Webhooks that do not really wait between two tries."""
    pauses: list[float] = []
    metrics = Metrics()
    hooks = Webhooks([receiver.url], SECRET, metrics, lambda: 1700.5, lambda _, seconds: pauses.append(seconds))
    hooks.start()
    yield hooks, metrics, pauses
    hooks.stop(10)


def test_a_commit_reaches_the_receiver_signed(receiver: Receiver, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    environment = {**os.environ, "CKPTD_WEBHOOKS": receiver.url, "CKPTD_WEBHOOK_SECRET": SECRET}
    with running_daemon(store.url, environment=environment) as daemon:
        checkpoint = write_checkpoint(store, "gpt", 7, {"model/scalar": sample_arrays()["model/scalar"]})
        wait_until(lambda: receiver.posts, "the post")
        assert SECRET not in daemon.log()
    headers, body = receiver.posts[0]
    assert (headers["x-ckptd-event"], json.loads(body)["checkpoint"]) == ("committed", checkpoint.id)
    assert headers["x-ckptd-delivery"] == str(json.loads(body)["id"])
    moment, digest = (part.split("=")[1] for part in headers["x-ckptd-signature"].split(","))
    expected = hmac.new(SECRET.encode(), f"{moment}.".encode() + body, sha256).hexdigest()
    assert hmac.compare_digest(digest, expected)
    assert len(receiver.posts) == 1


def test_it_is_retried_with_longer_pauses(receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]]) -> None:
    hooks, metrics, pauses = posting
    receiver.statuses = [500, 429, 503]
    hooks.offer(events(1))
    wait_until(lambda: outcomes(metrics) == {"delivered": 1}, "the delivery")
    assert len(receiver.posts) == 4
    assert {headers["x-ckptd-delivery"] for headers, _ in receiver.posts} == {"1000"}
    assert all(0.5 * base <= pause <= 1.5 * base for base, pause in zip((0.5, 1.0, 2.0), pauses, strict=True))


@pytest.mark.parametrize("status", [302, 307, 400, 401, 404, 410])
def test_a_refusal_is_final(receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]], status: int) -> None:
    hooks, metrics, _ = posting
    receiver.statuses = [status]
    hooks.offer(events(2))
    wait_until(lambda: outcomes(metrics) == {"failed": 1, "delivered": 1}, "both")
    assert [body["id"] for body in receiver.bodies()] == [1000, 1001]


def test_after_some_tries_the_next_one_goes(receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]]) -> None:
    hooks, metrics, _ = posting
    receiver.statuses = [500] * TRIES
    hooks.offer(events(2))
    wait_until(lambda: outcomes(metrics) == {"failed": 1, "delivered": 1}, "both")
    assert [body["id"] for body in receiver.bodies()] == [1000] * TRIES + [1001]


def test_only_what_receivers_want_is_posted(receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]]) -> None:
    hooks, metrics, _ = posting
    hooks.offer([*events(1, EventKind.DELETED), *events(1, EventKind.JOB_ENDED), *events(1, EventKind.PRUNED)])
    wait_until(lambda: outcomes(metrics) == {"delivered": 1}, "the delivery")
    assert [body["kind"] for body in receiver.bodies()] == ["pruned"]


def test_a_queue_that_is_full_forgets_the_oldest(receiver: Receiver) -> None:
    metrics = Metrics()
    hooks = Webhooks([receiver.url], SECRET, metrics, lambda: 0.0)
    hooks.offer(events(QUEUED + 5))
    assert outcomes(metrics) == {"dropped": 5}
    hooks.start()
    wait_until(lambda: len(receiver.posts) == QUEUED, "the rest")
    hooks.stop(10)
    assert receiver.bodies()[0]["id"] == 1005


@pytest.mark.parametrize("url", ["ftp://x/", "file:///etc/passwd", "http://", "x", "http://[::1", "javascript:1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidRequest, match="webhook"):
        Webhooks([url], SECRET, Metrics(), lambda: 0.0)


def test_a_secret_is_wanted() -> None:
    with pytest.raises(InvalidRequest, match="webhook_secret"):
        Webhooks(["https://example.org/"], "short", Metrics(), lambda: 0.0)
