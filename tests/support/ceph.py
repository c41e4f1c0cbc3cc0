"""Ceph's object gateway for tests, where Debian's packages are installed; its objects are in memory."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fsspec

from tests.support.ports import free_port
from tests.support.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY, S3Service, kept, wait_until_ready

_PROGRAMS = ("radosgw", "radosgw-admin", "ceph", "ceph-mon", "ceph-osd", "monmaptool")
_SETTINGS = """
[global]
fsid = {fsid}
mon host = {monitor}
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pg autoscale mode = off
mon allow pool size one = true
osd crush chooseleaf type = 0
osd objectstore = memstore
memstore device bytes = 4294967296
run dir = {folder}
log file = {folder}/$name.log
admin socket = {folder}/$name.asok
crash dir = {folder}
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
ms bind ipv4 = true
public addr = 127.0.0.1
cluster addr = 127.0.0.1
"""


def installed() -> bool:
    """All programs are on the PATH."""
    return all(map(shutil.which, _PROGRAMS))


@contextmanager
def running_service(folder: Path) -> Iterator[S3Service]:
    """A monitor, one OSD and a gateway with one empty bucket; killed on exit."""
    fsid, port, gateway = str(uuid.uuid4()), free_port(), free_port()
    settings, monitor = folder / "ceph.conf", f"v1:127.0.0.1:{port}"
    settings.write_text(_SETTINGS.format(fsid=fsid, monitor=monitor, folder=folder))
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, (command, done.stderr)

    of, addresses = ("-c", str(settings)), f"[{monitor}]"
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, str(folder / "map"))
    run("ceph-mon", *of, "--mkfs", "-i", "a", "--monmap", str(folder / "map"))
    with ExitStack() as running:
        daemons = {
            "mon": ["ceph-mon", *of, "-f", "-i", "a"], "osd": ["ceph-osd", *of, "-f", "-i", "0"],
            "rgw": ["radosgw", *of, "-f", "-n", "client.rgw", f"--rgw-frontends=beast endpoint=127.0.0.1:{gateway}"],
        }  # fmt: skip
        for name, command in daemons.items():
            if name == "osd":
                run("ceph", *of, "osd", "new", fsid)
                run("ceph-osd", *of, "--mkfs", "-i", "0", "--osd-uuid", fsid)
            (logs := folder / f"{name}.out").mkdir()
            running.enter_context(kept(command, logs, os.environ))
        wait_until_ready("radosgw", f"127.0.0.1:{gateway}", "/", http.client.OK, folder / "rgw.out" / "log")
        run("radosgw-admin", *of, "user", "create", "--uid", "tests", "--display-name", "tests",
            "--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)  # fmt: skip
        service = S3Service(f"http://127.0.0.1:{gateway}")
        fsspec.filesystem("s3", **service.options).mkdir(BUCKET)  # type: ignore[no-untyped-call]
        yield service
