"""Requests of the client: what is repeated and what is not, and which error each answer becomes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptapi.opening import open_source
from ckptstore.errors import CkptError, DaemonUnavailable, Forbidden, InvalidRequest, NoCheckpoint, StoreUnavailable
from ckptstore.reading.source import StoreSource
from tests.ckptapi.scripted import NO_ANSWER, Answer, answer, problem, scripted_client, scripted_daemon
from tests.support.ports import free_port

NO_RUNS = answer(bodies.Items([]))
BUSY = problem(503, "store_unavailable")


MISSING = problem(404, "no_checkpoint", "none of gpt", "save one")


@pytest.mark.parametrize(
    ("call", "answers", "patience_s", "error", "requests"),
    [
        ("runs", [BUSY, NO_ANSWER, BUSY, NO_RUNS], 60.0, None, ["GET"] * 4),
        ("runs", [BUSY, NO_RUNS], 0.0, StoreUnavailable, ["GET"]),
        ("revoke_token", [BUSY, NO_RUNS], 60.0, StoreUnavailable, ["DELETE"]),
        ("latest", [MISSING], 60.0, NoCheckpoint, ["GET"]),
    ],
)
def test_only_reads_are_repeated_while_there_is_patience_and_no_errors_that_last(
    call: str, answers: list[Answer], patience_s: float, error: type[CkptError] | None, requests: list[str]
) -> None:
    with (
        scripted_client(*answers, patience_s=patience_s) as (client, made),
        pytest.raises(error) if error else nullcontext() as caught,
    ):
        getattr(client, call)(*(() if call == "runs" else ("gpt",)))
    assert [request.method for request in made] == requests
    if caught is not None and error is NoCheckpoint:
        assert (caught.value.message, caught.value.hint) == ("none of gpt", "save one")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (problem(403, "forbidden"), Forbidden), (problem(500, "a_code_of_a_later_version"), CkptError),
        (Answer(502, b"<html>Bad gateway</html>"), DaemonUnavailable),
        (Answer(200, b"<html>Welcome</html>"), DaemonUnavailable), (Answer(200, b'{"items": 1}'), DaemonUnavailable),
        (Answer(302, b"", {"Location": "http://127.0.0.1:1/"}), DaemonUnavailable), (NO_ANSWER, DaemonUnavailable),
    ],
)  # fmt: skip
def test_every_bad_answer_is_one_of_our_errors(given: Answer, error: type[CkptError]) -> None:
    with scripted_client(given) as (client, _), pytest.raises(error) as caught:
        client.runs()
    assert type(caught.value) is error


def test_no_daemon_at_all() -> None:
    with closing(DaemonClient(f"http://127.0.0.1:{free_port()}", retries=0)) as client:
        with pytest.raises(DaemonUnavailable, match="did not respond"):
            client.runs()
        with pytest.raises(DaemonUnavailable):
            client.readiness()


def test_the_token_and_no_cache_are_sent() -> None:
    with scripted_daemon([NO_RUNS]) as daemon, closing(DaemonClient(daemon.url + "/", "secret")) as client:
        client.runs()
        client.read_past_caches()
        client.runs()
        first, second = (request.headers for request in daemon.requests)
        assert first["authorization"] == second["authorization"] == "Bearer secret"
        assert ("cache-control" in first, second["cache-control"]) == (False, "no-cache")


def test_every_page_of_a_listing_is_read() -> None:
    pages = [answer(bodies.Page([], cursor)) for cursor in ("a b", "c", None)]
    with scripted_client(*pages) as (client, requests):
        assert client.checkpoints("gpt") == []
        assert [request.path.partition("cursor=")[2] for request in requests] == ["", "a+b", "c"]


@pytest.mark.parametrize("name", ["../x", "a/b", "a?b", "a%2fb"])
def test_names_stay_one_part_of_the_path(name: str) -> None:
    with scripted_client(Answer()) as (client, requests):
        client.revoke_token(name)
        (request,) = requests
        assert request.path.count("/") == 3
        assert "?" not in request.path


def test_an_http_url_is_a_daemon_and_any_other_one_a_store_of_a_scheme_that_is_known(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:9", "https://ckptd.example:8443"):
        with closing(open_source(url, token="secret")) as source:
            assert isinstance(source, DaemonClient)
            assert (source.url, "secret" in repr(source)) == (url, False)
    for url in (str(tmp_path), tmp_path.as_uri(), "memory://opening"):
        opened = open_source(url)
        assert isinstance(opened, StoreSource)
        assert opened.runs() == []
    with pytest.raises(InvalidRequest, match="nosuch"):
        open_source("nosuch://bucket/prefix")


def test_a_store_is_opened_without_the_http_client(tmp_path: Path) -> None:
    code = f"import sys, ckptapi.opening as o; o.open_source({str(tmp_path)!r}); print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
