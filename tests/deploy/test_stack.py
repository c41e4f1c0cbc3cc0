"""The stack of docker-compose.yml as plain processes: its commands and settings, with ports of this machine."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import yaml

from ckptapi.bodies import Scope
from ckptstore.format.records import Policy
from ckptstore.retention.pruning import Prune
from ckptstore.stores import Store, open_store
from tests.support import seaweed
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.ports import free_port
from tests.support.postgresql import PostgresqlServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
CHOSEN = {
    "CKPTD_TOKEN": "chosen by the operator", "POSTGRES_PASSWORD": "p", "AWS_SECRET_ACCESS_KEY": "s3cret-of-the-test",
}  # fmt: skip


def services() -> dict[str, Any]:
    """What the file says, with the operator's choices in it."""
    text = (ROOT / "docker-compose.yml").read_text()
    found: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: CHOSEN[match[1]], text))
    return dict(found["services"])


def settings(given: Mapping[str, str], endpoint: str, database: str) -> dict[str, str]:
    """The environment of a service, with the addresses of this machine."""
    own = {**given, "CKPTD_DB": database}
    assert own["FSSPEC_S3_ENDPOINT_URL"] == "http://seaweedfs:8333"
    assert re.fullmatch(r"postgresql\+psycopg://ckptd:p@postgres:5432/ckptd", given["CKPTD_DB"])
    return {**os.environ, **own, "FSSPEC_S3_ENDPOINT_URL": endpoint}


@pytest.mark.slow
def test_the_stack_of_the_compose_file_works(tmp_path: Path, postgresql_server: PostgresqlServer) -> None:
    found, database = services(), postgresql_server.new_database()
    store_service = found["seaweedfs"]
    with seaweed.running_command(tmp_path, store_service["command"], store_service["environment"]) as endpoint:
        environment = settings(found["ckptd"]["environment"], endpoint, database)
        _create_bucket(found["bucket"], environment)
        access = {"key": environment["AWS_ACCESS_KEY_ID"], "secret": environment["AWS_SECRET_ACCESS_KEY"]}
        store = open_store(environment["CKPTD_STORE"], {"endpoint_url": endpoint, **access})
        checkpoint = write_checkpoint(store, step=1)
        scrape = _scrape_token(found["scrape-token"], environment, tmp_path)
        with running_daemon(environment["CKPTD_STORE"], database, environment=environment) as daemon:
            with daemon.client(CHOSEN["CKPTD_TOKEN"]) as client:
                assert client.latest() == checkpoint
                assert {token.name: token.scopes for token in client.tokens()} == {"prometheus": [Scope.READ]}
                assert client.plan_prune(Prune(Policy(1))).freed_bytes == 0
            headers = {"Authorization": f"Bearer {scrape}"}
            wait_until(lambda: httpx.get(f"{daemon.url}/metrics", headers=headers).status_code == 200, "a scrape")
            assert (
                'ckptd_last_committed_step{run="gpt"} 1.0' in httpx.get(f"{daemon.url}/metrics", headers=headers).text
            )
            assert daemon.log().startswith("{")
            assert not [secret for secret in (*CHOSEN.values(), scrape) if len(secret) > 1 and secret in daemon.log()]


def _create_bucket(service: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Run twice, it changes nothing."""
    for _ in range(2):
        subprocess.run(
            [sys.executable, *service["entrypoint"][1:], *service["command"]], env=environment, check=True, timeout=60
        )


def _scrape_token(service: Mapping[str, Any], environment: Mapping[str, str], folder: Path) -> str:
    """What the service writes. Run again it changes nothing; if the volume is lost, it writes a new one."""
    file = folder / "scrape" / "token"
    file.parent.mkdir()
    command = (
        service["command"][0]
        .replace("/scrape/", f"{folder}/scrape/")
        .replace("ckptd token", f"{sys.executable} -m ckptd token")
    )

    def run() -> str:
        subprocess.run([*service["entrypoint"], command], env=environment, check=True, timeout=60)
        assert os.listdir(file.parent) == ["token"]
        return file.read_text().strip()

    first = run()
    assert run() == first
    file.unlink()
    assert run() != first
    return file.read_text().strip()


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
def test_tokens_ranges_and_addresses_go_through(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, authority = write_checkpoint(store, step=1), trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "both.pem"))
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
            str(NGINX), "-e", str(tmp_path / "error.log"), "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"),
        ]  # fmt: skip
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
