"""The stack of docker-compose.yml as plain processes: its commands and settings, with ports of this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ckptapi.bodies import Scope
from ckptstore.format.records import Policy
from ckptstore.retention.pruning import Prune
from ckptstore.stores import open_store
from tests.support import seaweed
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.postgresql import PostgresqlServer
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
CHOSEN = {
    "CKPTD_TOKEN": "chosen by the operator",
    "POSTGRES_PASSWORD": "p",
    "AWS_SECRET_ACCESS_KEY": "s3cret-of-the-test",
}


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
    found = services()
    database = postgresql_server.new_database()
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
