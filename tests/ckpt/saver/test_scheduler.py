"""Reports to a scheduler: to a server with TLS in the place of that of Kubernetes, and to a cluster of Slurm."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import trustme

from ckpt.saver import scheduler
from ckpt.saver.heartbeat_writer import HeartbeatWriter, SharedStep
from ckpt.saver.messages import TrainerStarted
from ckpt.saver.scheduler import report_to_scheduler
from ckptstore.errors import InvalidRequest
from ckptstore.names import new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.slurm import is_missing, running_slurm
from tests.support.waiting import wait_until

_T, _WHEN = 1_700_000_000.0, "2023-11-14T22:13:20Z"
PREFIX = "ckptd.example.com/"


class Server(ThreadingHTTPServer):
    """Takes requests with a token, as the API server does, and keeps them: method, path, type and body."""

    requests: list[tuple[str, str, str, Any]]
    port: str


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            allowed = self.headers["Authorization"] == "Bearer secret"
            if allowed:
                listening.requests.append((self.command, self.path, self.headers["Content-Type"], body))
            self.send_response(200 if allowed else 403)
            self.end_headers()

        do_POST = do_PATCH  # noqa: N815 - as http.server calls it

        def log_message(self, *_: Any) -> None:
            pass

    listening = Server(("127.0.0.1", 0), Handler)
    listening.requests, listening.port = [], str(listening.server_address[1])
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    (folder / "token").write_text("secret\n")
    (folder / "namespace").write_text("team")
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield listening
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path) as running:
        yield running


def choose(monkeypatch: pytest.MonkeyPatch, kind: str, **variables: str) -> None:
    for name, value in {"CKPT_SCHEDULER": kind, **variables}.items():
        monkeypatch.setenv(name, value)


def in_a_pod(monkeypatch: pytest.MonkeyPatch, server: Server, folder: Path) -> None:
    monkeypatch.setattr(scheduler, "ACCOUNT", folder)
    monkeypatch.delenv("POD_NAME", raising=False)
    where = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": server.port, "HOSTNAME": "gpt-0"}
    choose(monkeypatch, "kubernetes", **where)


def test_the_heartbeat_annotates_the_pod(
    store: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_pod(monkeypatch, server, tmp_path)
    now, path = [_T], "/api/v1/namespaces/team/pods/gpt-0"

    def told() -> dict[str, str]:
        method, where, kind, body = server.requests[-1] if server.requests else ("", "", "", {})
        assert not method or (method, where, kind) == ("PATCH", path, "application/merge-patch+json")
        return body["metadata"]["annotations"] if body else {}

    writer = HeartbeatWriter(Run(store, "gpt", clock=lambda: now[0]), 0.05, _ranks=4)
    writer.begin(
        TrainerStarted(id=new_ulid(_T), parent=None, began_at=_T - 9, trains_at=_T - 5, restored_s=0.0), SharedStep()
    )
    none = {f"{PREFIX}last-checkpoint-time": "none", f"{PREFIX}lost-if-killed-now": "20"}
    wait_until(lambda: told() == none, "what is lost before the first checkpoint")
    writer.committed(7, _T)
    writer.committed(6, _T - 3)  # another rank's receipt came late
    now[0] = _T + 30
    some = {f"{PREFIX}last-checkpoint-time": _WHEN, f"{PREFIX}lost-if-killed-now": "120"}
    wait_until(lambda: told() == some, "the checkpoint")
    writer.close()


def test_a_refusal_is_an_error_and_the_heartbeat_goes_on(
    store: Store, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_a_pod(monkeypatch, server, tmp_path)
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(HTTPError, match="403") as refusal:
        report_to_scheduler(_T, None, _T, 1)
    assert refusal.value.closed
    writer = HeartbeatWriter(Run(store, "gpt"), 0.05)
    writer.begin(TrainerStarted(id=new_ulid(_T), parent=None, began_at=_T, trains_at=_T, restored_s=0.0), SharedStep())
    wait_until(lambda: caplog.text.count("did not take") > 1, "two beats that say so")
    (tmp_path / "token").write_text("secret")
    wait_until(lambda: bool(server.requests), "a beat that is taken")
    writer.close()


def test_a_trainjob_of_kubeflow_has_it_as_metrics(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, url = "KUBEFLOW_TRAINER_SERVER_", f"https://127.0.0.1:{server.port}/apis/trainer/status"
    files = {f"{prefix}CA_CERT": str(tmp_path / "ca.crt"), f"{prefix}TOKEN": str(tmp_path / "token")}
    choose(monkeypatch, "kubeflow", **files, **{f"{prefix}URL": url})
    report_to_scheduler(_T + 10, (_T, 7), _T - 100, 2)
    metrics = {"last_checkpoint_step": "7", "last_checkpoint_time": _WHEN, "lost_if_killed_now": "20"}
    listed = [{"name": name, "value": value} for name, value in metrics.items()]
    status = {"metrics": listed, "lastUpdatedTime": "2023-11-14T22:13:30Z"}
    assert server.requests == [("POST", "/apis/trainer/status", "application/json", {"trainerStatus": status})]


def test_slurm_is_told_by_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said\n')
    program.chmod(0o755)
    choose(monkeypatch, "slurm", PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="42")
    report_to_scheduler(_T + 10, (_T, 7), _T, 16)
    comment = f"Comment=last checkpoint: {_WHEN}, step 7; lost if killed now: 160 rank-seconds"
    assert (tmp_path / "said").read_text().splitlines() == ["update", "JobId=42", comment]
    program.write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(subprocess.CalledProcessError):
        report_to_scheduler(_T, None, _T, 1)


@pytest.mark.skipif(bool(is_missing()), reason="Slurm is not installed")
def test_a_job_of_slurm_has_the_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running_slurm(Path(folder)) as environment:
        submitted = ["sbatch", "--parsable", "--hold", "--wrap=true"]
        job = subprocess.run(submitted, env=environment, check=True, capture_output=True, text=True).stdout.strip()
        slurm = {name: environment[name] for name in ("PATH", "SLURM_CONF")}
        choose(monkeypatch, "slurm", SLURM_JOB_ID=job, **slurm)
        report_to_scheduler(_T + 10, (_T, 7), _T, 16)
        shown = subprocess.run(["scontrol", "show", "job", job], env=environment, check=True, capture_output=True)
        assert re.search(f"Comment=last checkpoint: {_WHEN}, step 7; .*160 rank", shown.stdout.decode())


def test_nothing_is_told_unless_it_is_asked_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_SCHEDULER", raising=False)
    report_to_scheduler(_T, None, _T, 1)
    assert server.requests == []
    choose(monkeypatch, "pbs")
    with pytest.raises(InvalidRequest, match="kubernetes, kubeflow or slurm"):
        report_to_scheduler(_T, None, _T, 1)
