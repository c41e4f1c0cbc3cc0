"""The nginx example in front of a real daemon."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
import trustme

from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.ports import free_port
from tests.support.waiting import wait_until

CONFIG = Path(__file__).parents[2] / "deploy" / "nginx" / "ckptd.conf"
NGINX = shutil.which("nginx")
_TOKEN = "correct horse battery staple"
_MAIN = """\
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    include {folder}/ckptd.conf;
}}
"""


@pytest.mark.skipif(NGINX is None, reason="no nginx: apt-get install nginx")
def test_tokens_ranges_and_addresses_pass_through(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(store, step=1)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    port = free_port()
    with running_daemon(store.url, environment={**os.environ, "CKPTD_TOKEN": _TOKEN}) as daemon:
        text = CONFIG.read_text().replace("127.0.0.1:8470", daemon.url.removeprefix("http://"))
        text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port} ssl")
        text = text.replace("/etc/nginx/tls/ckptd.crt", f"{tmp_path}/both.pem")
        text = text.replace("/etc/nginx/tls/ckptd.key", f"{tmp_path}/both.pem")
        (tmp_path / "ckptd.conf").write_text(text)
        (tmp_path / "nginx.conf").write_text(_MAIN.format(folder=tmp_path))
        command = [
            str(NGINX),
            "-e",
            str(tmp_path / "error.log"),
            "-p",
            str(tmp_path),
            "-c",
            str(tmp_path / "nginx.conf"),
        ]
        subprocess.run([*command, "-t"], check=True, capture_output=True, timeout=60)
        process = subprocess.Popen(command)
        try:
            wait_until(lambda: _listens(port), "nginx")
            with httpx.Client(
                base_url=f"https://127.0.0.1:{port}", headers={"Authorization": f"Bearer {_TOKEN}"}
            ) as http:
                path = f"/v1/checkpoints/{checkpoint.id}/shards/shard-00000.ckpt"
                part = http.get(path, headers={"Range": "bytes=10-19"})
                assert (part.status_code, len(part.content)) == (206, 10)
                assert "strict-transport-security" in part.headers  # it knows that the client speaks https
                assert http.get("/metrics").status_code == 404
                wrong = {"Authorization": "Bearer wrong", "X-Forwarded-For": "10.9.8.7"}
                codes = [http.get("/v1/runs", headers=wrong).status_code for _ in range(12)]
                assert codes == [401] * 10 + [429] * 2  # counted for us, not for the address we invented
        finally:
            process.terminate()
            process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
