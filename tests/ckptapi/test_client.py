"""Event streams of the client, line by line, and what it makes of answers that are not ckptd's."""

from __future__ import annotations

import pytest

from ckptapi import bodies
from ckptapi.bodies import EventBody
from ckptstore.errors import DaemonUnavailable, InvalidName, Unauthorized
from tests.ckptapi.scripted import Answer, problem, scripted_client

COMMITTED = b'{"id":7,"at":1.5,"kind":"committed","run":"gpt","a_field_of_a_later_version":1}'


def received(stream: bytes, after: int | None = None) -> tuple[list[EventBody], dict[str, str]]:
    """The events of a stream, and the headers of the request."""
    with scripted_client(Answer(200, stream, {"Content-Type": bodies.EVENT_STREAM})) as (client, requests):
        return list(client.event_stream(after)), requests[0].headers


def test_a_stream_is_parsed() -> None:
    stream = b": silence\n\nevent: open\nid: 3\ndata: {}\n\n:\n\nevent: gap\nid: 5\ndata: {}\n\n"
    stream += b"event: committed\nid: 7\ndata: " + COMMITTED + b"\n\n"
    events, headers = received(stream, after=3)
    assert [(event.id, event.kind) for event in events] == [(3, bodies.OPEN), (5, bodies.GAP), (7, "committed")]
    assert events[-1] == EventBody(id=7, at=1.5, kind="committed", run="gpt")
    assert (headers["accept"], headers["last-event-id"]) == (bodies.EVENT_STREAM, "3")


def test_a_new_stream_names_no_position() -> None:
    events, headers = received(b"")
    assert events == []
    assert "last-event-id" not in headers


@pytest.mark.parametrize("cut", [b"event: committed\nid: 7\n", b"event: committed\nid: 7\ndata: " + COMMITTED])
def test_an_event_that_is_cut_off_is_not_delivered(cut: bytes) -> None:
    events, _ = received(b"event: open\nid: 3\ndata: {}\n\n" + cut)
    assert [event.kind for event in events] == [bodies.OPEN]


@pytest.mark.parametrize("rest", [b"id: x\ndata: {}", b"id: 7\ndata: {", b"id: 7\ndata: []"])
def test_an_event_that_is_not_ckptds(rest: bytes) -> None:
    with pytest.raises(DaemonUnavailable, match="invalid event"):
        received(b"event: committed\n" + rest + b"\n\n")


def test_a_stream_that_is_refused() -> None:
    with scripted_client(problem(401, "unauthorized")) as (client, _), pytest.raises(Unauthorized):
        next(client.event_stream())


def test_the_version_and_clock_of_a_daemon() -> None:
    with scripted_client(Answer(200, b'{"info": {"version": "9.1"}}')) as (client, _):
        about = client.about()
        assert about.version == "9.1"
        assert about.at is not None
        assert about.at > 1.7e9


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"info": {}}'])
def test_a_server_that_is_not_ckptd(body: bytes) -> None:
    with scripted_client(Answer(200, body)) as (client, _):
        for request in (client.about, client.readiness):
            with pytest.raises(DaemonUnavailable, match="is not a ckptd"):
                request()


@pytest.mark.parametrize("id", ["", "x", "../tokens", "01HF7YAT00ABCDEFGHJKMNPQRS/x"])
def test_bad_ids_are_refused_before_a_request(id: str) -> None:
    with scripted_client(Answer()) as (client, requests):
        for request in (client.job, client.cancel_job, client.restore_session, client.cancel_restore):
            with pytest.raises(InvalidName):
                request(id)
        assert requests == []
