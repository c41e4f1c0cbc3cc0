from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme

from ckptapi.client import DaemonClient
from ckptstore.errors import DaemonUnavailable
from ckptstore.stores import Store
from tests.support import forking
from tests.support.checkpoints import write_checkpoint
from tests.support.command_line import run
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

_SHARD_BYTES = 24 << 20


def test_tls_end_to_end(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, authority = write_checkpoint(store, step=1), trustme.CA()
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
    command = ["serve", "--store", str(tmp_path), "--db", f"sqlite:///{tmp_path}/i.db", "--auth", "off", "--port", "0"]
    code, _, errors = forking.run(forking.DAEMON, "ckptd", [*command, "--tls-cert", str(file), "--tls-key", str(file)])
    assert (code, "Traceback" in errors) == (2, False), errors
    assert f"cannot use certificate {file}" in errors


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
