"""Servers on hosts of their own, and what is asked of them there."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from ckptapi.client import DaemonClient
from tests.hosts.bed import Machine
from tests.hosts.machine import DISK
from tests.support.seaweed import BUCKET, running_service

STORE = f"s3://{BUCKET}/ckpts"
DAEMON_PORT = 8470
TOKEN = "a-token-of-the-tests"


def start_s3(machine: Machine) -> Mapping[str, str]:
    """SeaweedFS on a host, with its data on the disk there; the environment of clients."""
    reader, writer = os.pipe()
    machine.fork("tests.hosts.services", [machine.address], stdout=writer, stderr=2)
    os.close(writer)
    with open(reader) as output:
        said = output.readline()
    assert said, "the S3 service did not start"
    found: dict[str, str] = json.loads(said)
    return found


def start_daemon(machine: Machine, environment: Mapping[str, str]) -> str:
    """ckptd on a host, for STORE, with its data on the disk there; its URL, where it is ready."""
    url = f"http://{machine.address}:{DAEMON_PORT}"
    machine.start(
        "ckptd", "serve", "--store", STORE, "--db", f"sqlite:///{DISK}/index.db", "--cache", f"{DISK}/cache",
        "--host", machine.address, "--port", str(DAEMON_PORT), "--poll-seconds", "1",
        "--commit-grace-seconds", "0.3", "--notice-seconds", "0",
        environment={**environment, "CKPTD_TOKEN": TOKEN},
    )  # fmt: skip
    machine.run("ckptctl", "--url", url, "doctor", "--wait", "60s", environment={"CKPT_TOKEN": TOKEN})
    return url


def preempt(url: str, run: str) -> None:
    """On a host: notice for the trainers of a run, from the daemon."""
    with closing(DaemonClient(url, TOKEN)) as client:
        client.preempt(run, 60.0)


if __name__ == "__main__":
    with running_service(Path(DISK), ip=sys.argv[1]) as service:
        print(json.dumps(service.environment), flush=True)
        signal.pause()
