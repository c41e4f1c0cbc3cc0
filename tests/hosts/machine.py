"""The first process of a host: it has namespaces of its own, starts programs when it is asked to, and ends with them.

    python -m tests.hosts.machine <socket> <options>

It is a host of forks (tests.support.forking) with PID 1. When it ends, in any way, the kernel kills all processes of
the host, and removes its network and its file systems. It ends with the process that asks it. So nothing of a host
stays, and nothing of it has a name outside.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.support import forking

DISK = "/mnt"
"""The disk of a host, which survives it."""
DISKS = "/run/disks"
"""In the rack: the disks of all hosts, by name."""
CLOCK = Path(__file__).with_name("clock")
CLOCK_VARIABLE = "CKPTD_TEST_CLOCK_S"
_EMPTY = ("/tmp", "/dev/shm", "/run")
_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_MS_BIND, _MS_PRIVATE = 0x1000, 0x44000
_PR_SET_PDEATHSIG = 1
_TRIAL = """set -e
mount -t tmpfs none /mnt
ip link add name a type veth peer name b
ip link add name c type bridge
ip link set dev a master c
tc qdisc add dev a root tbf rate 1mbit burst 32kb latency 1ms"""
_libc = ctypes.CDLL(None, use_errno=True)


def refusal() -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    if os.geteuid() != 0:
        return "hosts are namespaces of the kernel, which need root"
    try:
        trial = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", _TRIAL]
        tried = subprocess.run(trial, capture_output=True, text=True)
    except FileNotFoundError:
        return "hosts need the program unshare"
    return f"hosts need namespaces, iproute2, veth, bridges and tbf: {tried.stderr}" if tried.returncode else None


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Begin the host: send its first process as it is seen from here, and return when it has ended.

    options: name, hosts (/etc/hosts), hidden (folders that are empty on this host), clock_s (of its wall clock).
    """
    connection = socket.socket(fileno=descriptor)
    _call("unshare", _NEWPID)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _begin(options)
        os.write(writer, b".")  # fails if the parent ended before the line above
        os.close(writer)
        forking.main(connection.detach(), [])
        return
    os.close(writer)
    if os.read(reader, 1):
        first = os.pidfd_open(pid)
        socket.send_fds(connection, [str(pid).encode()], [first])
        os.close(first)
    connection.close()
    os.waitpid(pid, 0)


def _begin(options: dict[str, Any]) -> None:
    _call("unshare", _NEWNS | _NEWUTS | _NEWIPC | _NEWNET)
    socket.sethostname(options["name"])
    _call("mount", b"none", b"/", None, _MS_PRIVATE, None)
    _mount("proc", "/proc")
    _bind(f"{DISKS}/{options['name']}", DISK)
    code = {path: os.open(path, os.O_PATH) for path in (str(forking.ROOT), sys.prefix)}
    for folder in (*_EMPTY, *options["hidden"]):
        os.makedirs(folder, exist_ok=True)
        _mount("tmpfs", folder)
    for path, opened in code.items():
        if not os.path.exists(path):  # it is below one of these
            os.makedirs(path)
            _bind(f"/proc/self/fd/{opened}", path)
        os.close(opened)
    for path, content in (
        ("/proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n"), ("/etc/hosts", options["hosts"]),
        ("/etc/resolv.conf", ""),
    ):  # fmt: skip
        own = Path("/run", os.path.basename(path))
        own.write_text(content)
        _bind(str(own), path)
    if options["clock_s"]:
        os.environ[CLOCK_VARIABLE] = str(options["clock_s"])
        runpy.run_path(str(CLOCK / "sitecustomize.py"))


def _mount(kind: str, target: str) -> None:
    _call("mount", b"none", target.encode(), kind.encode(), 0, None)


def _bind(source: str, target: str) -> None:
    if os.path.exists(source):
        _call("mount", source.encode(), target.encode(), None, _MS_BIND, None)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
