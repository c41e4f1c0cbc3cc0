"""A bucket that does not exist is not a store without checkpoints: for the store, the trainer, ckptctl and a daemon."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec.config
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import latest
from ckptstore.errors import NoSuchBucket
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.checks import check_store, creates_once, run_store_checks
from tests.conftest import S3Location, cloud_options
from tests.support.command_line import invoke
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until

URL = "s3://no-such-bucket/ckpts"
_REPLY = b"<Error><Code>NoSuchBucket</Code><Message>The specified bucket does not exist</Message></Error>"


class _NoBuckets(BaseHTTPRequestHandler):
    """Answers as AWS S3 does for a bucket that does not exist. SeaweedFS would create it with the first write."""

    protocol_version = "HTTP/1.1"  # answers Expect: 100-continue

    def _refuse(self) -> None:
        if (length := self.headers.get("Content-Length")) is not None:
            self.rfile.read(int(length))
        elif self.headers.get("Transfer-Encoding") == "chunked":
            while self.rfile.readline().strip():
                pass
        self.send_response(404)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(_REPLY)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(_REPLY)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _refuse  # noqa: N815 - the names that http.server calls

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An S3 service without any bucket."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _NoBuckets) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "key": "k", "secret": "s"}


def environment(endpoint: str) -> dict[str, str]:
    keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_MAX_ATTEMPTS": "1"}
    return {**os.environ, **keys, "FSSPEC_S3_ENDPOINT_URL": endpoint}


READS: list[Callable[[Store], object]] = [
    lambda store: list(store.list("gpt/")),
    lambda store: list(store.list_folders("")),
    lambda store: store.get("gpt/a"),
    lambda store: store.read_into("gpt/a", 0, memoryview(bytearray(1))),
    lambda store: latest(Run(store, "gpt")),
]
WRITES: list[Callable[[Store], object]] = [
    lambda store: store.put("gpt/a", b"x"),
    lambda store: store.put_if_absent("gpt/a", b"x"),
]


def test_every_call_of_the_store_says_so(options: dict[str, Any]) -> None:
    for call in (*READS, *WRITES):
        with pytest.raises(NoSuchBucket, match=f"the bucket of {URL}"):
            call(open_store(URL, options))


def test_a_real_service_is_understood(s3_store: S3Location) -> None:
    for call in READS:
        with pytest.raises(NoSuchBucket, match=f"the bucket of {URL}"):
            call(open_store(URL, s3_store.options))


@pytest.mark.parametrize(("kind", "url"), [("gcs", "gs://no-such-bucket/x"), ("azure", "abfs://no-such-bucket/x")])
def test_other_services_are_understood(kind: str, url: str, request: pytest.FixtureRequest) -> None:
    """Their libraries list a missing bucket as an empty folder."""
    service = request.getfixturevalue(f"{kind}_service")
    for call in (*READS, *WRITES):
        with pytest.raises(NoSuchBucket, match=f"the bucket of {url}"):
            call(open_store(url, cloud_options(kind, service)))


def test_a_probe_does_not_create_it(s3_store: S3Location) -> None:
    """SeaweedFS creates a bucket with the first write."""
    store = open_store(URL, s3_store.options)
    for probe in (check_store, creates_once):
        with pytest.raises(NoSuchBucket):
            probe(store, system_clock)
    problems = [check.detail for check in run_store_checks(store, system_clock).checks if not check.ok]
    assert "bucket" in problems[0]
    with pytest.raises(NoSuchBucket):
        list(store.list(""))


def test_a_trainer_does_not_start_from_scratch(options: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(URL, run="gpt", options=options) as checkpointer:
        for begin in (checkpointer.restore, checkpointer.prepare):
            with pytest.raises(NoSuchBucket):
                begin(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(NoSuchBucket):
            checkpointer.latest()


def test_the_command_line_exits_like_out_of_reach(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", options)  # fsspec reads its environment when it is imported
    for command in (("latest", "gpt"), ("ls",), ("runs",)):
        done = invoke(*command, "--store", URL, "-o", "json")
        assert (done.code, done.error["code"]) == (7, "no_such_bucket")


def test_a_daemon_is_not_ready_and_says_why(endpoint: str) -> None:
    with running_daemon(URL, environment=environment(endpoint), ready=False) as daemon:
        wait_until(lambda: daemon.get("/checkpoints/latest?run=gpt").json()["code"] == "no_such_bucket", "the listing")
        assert daemon.get("/checkpoints/latest?run=gpt").status_code == 503
        ready = daemon.get("/readyz")
        assert (ready.status_code, "does not exist" in ready.json()["store"]) == (503, True)
