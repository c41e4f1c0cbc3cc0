"""Webhooks against a receiver with prepared answers: signed, tried again, bounded, never redirected."""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ckptapi.bodies import EventBody, EventKind
from ckptd.housekeeping.webhooks import QUEUED, TRIES, Webhooks
from ckptd.metrics import Metrics
from ckptstore.errors import InvalidRequest
from ckptstore.stores import open_store
from tests.ckptapi.scripted import Answer, Request, scripted_daemon
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

SECRET = "correct horse battery"


@dataclass
class Receiver:
    """What was posted, and its answers: the last one is repeated."""

    url: str
    posts: list[Request]
    answers: list[Answer]

    def answer(self, *statuses: int) -> None:
        """These statuses first, then 200."""
        self.answers[:0] = [Answer(status, headers={"Location": "/elsewhere"}) for status in statuses]

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(post.body) for post in self.posts]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    answers = [Answer()]
    with scripted_daemon(answers) as server:
        yield Receiver(server.url, server.requests, answers)


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
        checkpoint = write_checkpoint(store, "gpt", 7, SMALL)
        wait_until(lambda: receiver.posts, "the post")
        assert SECRET not in daemon.log()
    headers, body = receiver.posts[0].headers, receiver.posts[0].body
    assert (headers["x-ckptd-event"], json.loads(body)["checkpoint"]) == ("committed", checkpoint.id)
    assert headers["x-ckptd-delivery"] == str(json.loads(body)["id"])
    moment, digest = (part.split("=")[1] for part in headers["x-ckptd-signature"].split(","))
    expected = hmac.new(SECRET.encode(), f"{moment}.".encode() + body, sha256).hexdigest()
    assert hmac.compare_digest(digest, expected)
    assert len(receiver.posts) == 1


def test_a_chat_gets_a_sentence(receiver: Receiver) -> None:
    hooks = Webhooks([f"chat+{receiver.url}"], "", Metrics(), lambda: 0.0)
    hooks.start()
    hooks.offer(
        [EventBody(kind=EventKind.CORRUPT, run="gpt", checkpoint="gpt@7.01HF", detail={"problem": "a <b> & c"})]
    )
    hooks.offer([EventBody(kind=EventKind.PRUNED, run="a/b", detail={"checkpoints": 3, "ids": ["x"]})])
    wait_until(lambda: len(receiver.posts) == 2, "the posts")
    hooks.stop(10)
    assert receiver.bodies() == [
        {"text": "corrupt: gpt@7 (problem a &lt;b&gt; &amp; c)"}, {"text": "pruned: a/b (checkpoints 3)"}
    ]  # fmt: skip


def test_it_is_retried_with_longer_pauses(receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]]) -> None:
    hooks, metrics, pauses = posting
    receiver.answer(500, 429, 503)
    hooks.offer(events(1))
    wait_until(lambda: outcomes(metrics) == {"delivered": 1}, "the delivery")
    assert len(receiver.posts) == 4
    assert {post.headers["x-ckptd-delivery"] for post in receiver.posts} == {"1000"}
    assert all(0.5 * base <= pause <= 1.5 * base for base, pause in zip((0.5, 1.0, 2.0), pauses, strict=True))


@pytest.mark.parametrize("statuses", [[302], [307], [400], [401], [404], [410], [500] * TRIES], ids=str)
def test_a_refusal_is_final_and_after_some_tries_the_next_one_goes(
    receiver: Receiver, posting: tuple[Webhooks, Metrics, list[float]], statuses: list[int]
) -> None:
    hooks, metrics, _ = posting
    receiver.answer(*statuses)
    hooks.offer(events(2))
    wait_until(lambda: outcomes(metrics) == {"failed": 1, "delivered": 1}, "both")
    assert [body["id"] for body in receiver.bodies()] == [1000] * len(statuses) + [1001]


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
