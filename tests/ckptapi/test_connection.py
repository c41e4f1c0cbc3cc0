"""Requests of the client: what is repeated and what is not, and which error each answer becomes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptapi.opening import open_source
from ckptstore.errors import CkptError, DaemonUnavailable, Forbidden, InvalidRequest, NoCheckpoint, StoreUnavailable
from ckptstore.reading.source import StoreSource
from tests.ckptapi.scripted import NO_ANSWER, Answer, answer, problem, scripted_daemon
from tests.support.ports import free_port

NO_RUNS = answer(bodies.Items([]))
BUSY = problem(503, "store_unavailable")


def test_reads_are_repeated_while_there_is_patience() -> None:
    with (
        scripted_daemon([BUSY, NO_ANSWER, BUSY, NO_RUNS]) as daemon,
        closing(DaemonClient(daemon.url, patience_s=60.0)) as client,
    ):
        assert (client.runs(), [request.method for request in daemon.requests]) == ([], ["GET"] * 4)


def test_reads_are_not_repeated_without_patience() -> None:
    with scripted_daemon([BUSY, NO_RUNS]) as daemon, closing(DaemonClient(daemon.url)) as client:
        with pytest.raises(StoreUnavailable):
            client.runs()
        assert len(daemon.requests) == 1


def test_changes_are_never_repeated() -> None:
    with scripted_daemon([BUSY, NO_RUNS]) as daemon, closing(DaemonClient(daemon.url, patience_s=60.0)) as client:
        with pytest.raises(StoreUnavailable):
            client.revoke_token("laptop")
        assert [(request.method, request.path) for request in daemon.requests] == [("DELETE", "/v1/tokens/laptop")]


def test_errors_that_last_are_not_repeated() -> None:
    with (
        scripted_daemon([problem(404, "no_checkpoint", "none of gpt", "save one")]) as daemon,
        closing(DaemonClient(daemon.url, patience_s=60.0)) as client,
    ):
        with pytest.raises(NoCheckpoint, match="none of gpt") as caught:
            client.latest("gpt")
        assert (caught.value.hint, len(daemon.requests)) == ("save one", 1)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (problem(403, "forbidden"), Forbidden),
        (problem(500, "a_code_of_a_later_version"), CkptError),
        (Answer(502, b"<html>Bad gateway</html>"), DaemonUnavailable),
        (Answer(200, b"<html>Welcome</html>"), DaemonUnavailable),
        (Answer(200, b'{"items": 1}'), DaemonUnavailable),
        (Answer(302, b"", {"Location": "http://127.0.0.1:1/"}), DaemonUnavailable),
        (NO_ANSWER, DaemonUnavailable),
    ],
)
def test_every_bad_answer_is_one_of_our_errors(given: Answer, error: type[CkptError]) -> None:
    with scripted_daemon([given]) as daemon, closing(DaemonClient(daemon.url)) as client:
        with pytest.raises(error) as caught:
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
    with scripted_daemon(pages) as daemon, closing(DaemonClient(daemon.url)) as client:
        assert client.checkpoints("gpt") == []
        assert [request.path.partition("cursor=")[2] for request in daemon.requests] == ["", "a+b", "c"]


@pytest.mark.parametrize("name", ["../x", "a/b", "a?b", "a%2fb"])
def test_names_stay_one_part_of_the_path(name: str) -> None:
    with scripted_daemon([Answer()]) as daemon, closing(DaemonClient(daemon.url)) as client:
        client.revoke_token(name)
        (request,) = daemon.requests
        assert request.path.count("/") == 3
        assert "?" not in request.path


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "https://ckptd.example:8443"])
def test_an_http_url_is_a_daemon(url: str) -> None:
    source = open_source(url, token="secret")
    try:
        assert isinstance(source, DaemonClient)
        assert source.url == url
        assert "secret" not in repr(source)
    finally:
        source.close()


def test_any_other_url_is_a_store(tmp_path: Path) -> None:
    for url in (str(tmp_path), tmp_path.as_uri(), "memory://opening"):
        source = open_source(url)
        assert isinstance(source, StoreSource)
        assert source.runs() == []


def test_a_scheme_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nosuch"):
        open_source("nosuch://bucket/prefix")


def test_a_store_is_opened_without_the_http_client(tmp_path: Path) -> None:
    code = f"import sys, ckptapi.opening as o; o.open_source({str(tmp_path)!r}); print('httpx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
