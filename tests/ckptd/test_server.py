"""TLS, logs, traces, and the end of a daemon under slow readers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptstore.errors import DaemonUnavailable
from ckptstore.stores import Store
from tests.ckptd.collector import running_collector
from tests.conftest import S3Location
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import run
from tests.support.daemons import Daemon, running_daemon
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY
from tests.support.waiting import wait_until

_TOKEN = "correct horse battery staple"
_SHARD_BYTES = 24 << 20


def test_tls_end_to_end(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write_checkpoint(store, step=1)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1", "localhost")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    options = ("--tls-cert", str(tmp_path / "both.pem"), "--tls-key", str(tmp_path / "both.pem"))
    with running_daemon(store.url, options=options, ready=False) as daemon:
        assert daemon.url.startswith("https://127.0.0.1:")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        wait_until(lambda: httpx.get(daemon.url + "/readyz").status_code == 200, "readiness")
        answer = httpx.get(f"{daemon.url}/v1/checkpoints/{checkpoint.id}")
        assert "max-age" in answer.headers["strict-transport-security"]
        with daemon.client() as client:
            assert client.latest() == checkpoint
        shown = run("latest", "-o", "id", "--url", daemon.url, env={"SSL_CERT_FILE": str(tmp_path / "ca.pem")})
        assert shown.stdout.strip() == checkpoint.id
        with pytest.raises(httpx.TransportError):
            httpx.get(daemon.url.replace("https", "http") + "/livez")
        monkeypatch.delenv("SSL_CERT_FILE")
        client = DaemonClient(daemon.url, retries=0)
        with pytest.raises(DaemonUnavailable, match="certificate"):
            client.latest()
        client.close()


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_certificate_that_cannot_be_used_ends_it_with_a_sentence(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "both.pem"
    if content is not None:
        file.write_text(content)
    command = [sys.executable, "-m", "ckptd", "serve", "--store", str(tmp_path), "--db", f"sqlite:///{tmp_path}/i.db"]
    command += ["--auth", "off", "--port", "0", "--tls-cert", str(file), "--tls-key", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr
    assert f"cannot use certificate {file}" in ended.stderr


def test_logs_are_json_with_the_ids_of_requests(store: Store) -> None:
    write_checkpoint(store, step=1)
    environment = {**os.environ, "CKPTD_TOKEN": _TOKEN}
    with running_daemon(store.url, options=("--log-format", "json"), environment=environment, ready=False) as daemon:
        headers = {"Authorization": f"Bearer {_TOKEN}"}

        def ask(id: str, path: str = "/checkpoints/latest") -> str:
            return daemon.get(path, headers={**headers, "X-Request-ID": id}).headers["x-request-id"]

        wait_until(lambda: daemon.get("/readyz").status_code == 200, "readiness")
        assert ask("job-7.rank_3") == "job-7.rank_3"
        for bad in ("x" * 65, "a b", 'a"b', "", "a%0ab"):
            assert re.fullmatch("[0-9a-f]{32}", ask(bad)), bad
        missing = daemon.get("/checkpoints/latest?run=none", headers={**headers, "X-Request-ID": "ask-none"})
        assert missing.json()["request_id"] == "ask-none"
        wait_until(lambda: "ask-none" in daemon.log(), "the log line")
        lines = [json.loads(line) for line in daemon.log().splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "request_id", "message"} <= line.keys()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    found = next(line for line in lines if line["request_id"] == "job-7.rank_3")
    assert found["message"].startswith("GET /checkpoints/latest 200")
    assert (found["status"], found["caller"], found["path"]) == (200, "bootstrap", "/checkpoints/latest")
    assert found["seconds"] > 0
    assert next(line for line in lines if line["request_id"] == "ask-none")["status"] == 404


def test_secrets_are_in_no_log(s3_store: S3Location, tmp_path: Path) -> None:
    """A session with everything that could slip out: tokens, keys of the store, a password in a URL, failures."""
    environment = {**s3_store.environment, "CKPTD_TOKEN": _TOKEN, "CKPTD_LOG_LEVEL": "debug"}
    seen = [_TOKEN, SECRET_KEY]
    logs = []
    for form in ("text", "json"):
        with running_daemon(s3_store.url, options=("--log-format", form), environment=environment) as daemon:
            headers = {"Authorization": f"Bearer {_TOKEN}"}
            made = daemon.post(bodies.TOKENS, {"name": f"t-{form}", "scopes": ["read"]}, headers=headers).json()[
                "secret"
            ]
            seen += [made, made.rpartition("_")[2]]
            daemon.get(bodies.RUNS, headers={"Authorization": f"Bearer {made}"})
            daemon.get(f"/v1/checkpoints/{made}", headers={"Authorization": f"Bearer {made}x"})
            daemon.get(f"/checkpoints/latest?token={made}", headers={"Authorization": f"Bearer {made}"})
            daemon.post(bodies.TOKENS, {"name": made, "scopes": ["read"]}, headers=headers)
            logs.append(daemon.log())
    failing = {**environment, "AWS_SECRET_ACCESS_KEY": "wrong secret of the test", "CKPTD_TOKEN": _TOKEN}
    with running_daemon(s3_store.url, environment=failing, ready=False) as daemon:
        wait_until(lambda: "store" in daemon.log() and "cannot" in daemon.log(), "a failure of the store")
        logs.append(daemon.log() + daemon.get("/readyz").text)
    url = "ftp://me:hidden-word@127.0.0.1:9/folder"
    command = [sys.executable, "-m", "ckptd", "serve", "--store", url, "--db", f"sqlite:///{tmp_path}/i.db"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CKPTD_")}
    ended = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    logs.append(ended.stdout + ended.stderr)
    seen += ["wrong secret of the test", "hidden-word"]
    assert ACCESS_KEY != SECRET_KEY
    assert all(len(log) > 50 for log in logs)
    assert [secret for secret in seen for log in logs if secret in log] == []


def test_requests_are_traced_to_a_collector(store: Store) -> None:
    write_checkpoint(store, step=1)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with running_collector() as collector:
        with running_daemon(store.url, options=("--otlp-endpoint", collector.url)) as daemon:
            headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-ID": "traced"}
            daemon.get("/checkpoints/latest?run=gpt", headers=headers)
            daemon.get("/v1/checkpoints/gpt@99", headers=headers)
        assert set(collector.paths) == {"/v1/traces"}
        spans = [span for span in collector.spans if _hex(span["traceId"]) == trace]
    by_name = {span["name"]: span for span in spans}
    request = by_name["GET /checkpoints/latest"]
    assert (_hex(request["parentSpanId"]), request["kind"], request["service"]) == (parent, "SPAN_KIND_SERVER", "ckptd")
    assert (
        request["attributes"].items()
        >= {
            "http.request.method": "GET",
            "http.route": "/checkpoints/latest",
            "http.response.status_code": "200",
            "url.path": "/checkpoints/latest",
            "url.query": "",
            "http.response.header.x_request_id": {"values": [{"stringValue": "traced"}]},
        }.items()
    )
    assert "run=gpt" not in str(spans)
    assert by_name["GET /v1/checkpoints/{id}"]["attributes"]["http.response.status_code"] == "404"
    inner = [span for span in spans if span["name"] in ("index", "store")]
    assert {span["parentSpanId"] for span in inner} <= {span["spanId"] for span in spans}
    assert inner


def test_a_collector_that_is_away_disturbs_no_request(store: Store) -> None:
    write_checkpoint(store, step=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens here
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with running_daemon(store.url, options=("--otlp-endpoint", endpoint)) as daemon:
            assert daemon.get("/checkpoints/latest").status_code == 200
            assert daemon.stop() == 0


@pytest.fixture
def big(store: Store) -> str:
    """The path of a shard that no socket buffer holds."""
    array = np.frombuffer(np.random.default_rng(0).bytes(_SHARD_BYTES), dtype=np.uint8)
    checkpoint = write_checkpoint(store, step=1, arrays={"model/big": array})
    return f"/v1/checkpoints/{checkpoint.id}/shards/shard-00000.ckpt"


def test_a_slow_download_is_finished_within_the_drain_time(store: Store, big: str) -> None:
    with running_daemon(store.url, options=("--notice-seconds", "0.5", "--drain-seconds", "20")) as daemon:
        received, expected = _slow_download(daemon, big, lambda: time.sleep(1.5))
        assert received == expected >= _SHARD_BYTES
        assert daemon.process.wait(60) == 0


def test_a_download_that_exceeds_the_drain_time_is_cut_off(store: Store, big: str) -> None:
    with running_daemon(store.url, options=("--notice-seconds", "0", "--drain-seconds", "1")) as daemon:
        received, expected = _slow_download(daemon, big, lambda: daemon.process.wait(60))
        assert received < expected
        assert daemon.process.wait(60) == 0


def _slow_download(daemon: Daemon, path: str, pause: Callable[[], object]) -> tuple[int, int]:
    """Bytes received and announced of a download that pauses when SIGTERM has been sent."""
    received = 0
    with httpx.stream("GET", daemon.url + path, timeout=30) as response:
        parts = response.iter_raw(1 << 16)
        received += len(next(parts))
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: _leaving(daemon), "saying so in /readyz, or closing the port")
        pause()
        try:
            for part in parts:
                received += len(part)
        except httpx.TransportError:
            pass  # cut off
        return received, int(response.headers["content-length"])


def _leaving(daemon: Daemon) -> bool:
    try:
        return daemon.get("/readyz").status_code == 503
    except httpx.TransportError:
        return True


def _hex(base64_text: str) -> str:
    return b64decode(base64_text).hex()
