"""How fast parallel readers get a shard through the daemon's warm cache, against nginx serving the same file.

Readers are separate processes, the same program for both servers: they request ranges of 16 MiB over one connection
each, and discard the bytes. The cold pass before counts the bytes that the store served for them. The two servers are
measured in turns; each has the machine's cores, which the readers use too.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import httpx
import torch
from torch import nn

from bench.readers import RANGE_BYTES
from bench.report import Goal, Report
from ckpt import Checkpointer
from ckptapi import bodies
from ckptstore import names
from ckptstore.names import RunKeys

GOAL = 0.5
"""Throughput of the daemon as a fraction of nginx's."""
STORE_GOAL = 1.02
"""Bytes read from the store over unique bytes."""
READERS = 8
REPETITIONS = 5
_DEADLINE_S = 60.0
_NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/errors; worker_processes auto;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_timeout 75; keepalive_requests 100000;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{port}; root {root}; }}
}}
"""


def measure(quick: bool) -> Report:
    """Measure over a folder of the default temporary file system."""
    num_bytes = (64 if quick else 512) << 20
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        path, key = _write_shard(folder / "store", num_bytes)
        size = (folder / "store" / key).stat().st_size
        url, _ = stack.enter_context(daemon(folder))
        _read(url + path, size)
        store_ratio = _counter(url, "ckptd_cache_store_bytes_total") / size
        peer, problem = None, ""
        try:
            peer = stack.enter_context(nginx(folder, folder / "store"))
        except (OSError, RuntimeError) as error:
            problem = str(error)
        ours, theirs = [], []
        for _ in range(REPETITIONS):
            ours.append(_read(url + path, size))
            if peer is not None:
                theirs.append(_read(f"{peer}/{key}", size))
    throughput = median(theirs) / median(ours) if theirs else float("nan")
    total = READERS * size
    rows = [_row("ckptd", ours, total), _row("nginx", theirs, total, problem)]
    rows.append(("store bytes / unique bytes", f"{store_ratio:.3f}", "", "goal: at most 1.02"))
    return Report(
        bench="daemon-read",
        what=f"{READERS} readers of one shard of {size / 1e6:.0f} MB, ranges of {RANGE_BYTES >> 20} MiB, warm; "
        f"median of {REPETITIONS} in turns",
        columns=("", "seconds", "GB/s", ""),
        rows=rows,
        goals=[
            Goal("throughput", "nginx", throughput, GOAL, "at least"),
            Goal("store bytes, cold", "unique bytes", store_ratio, STORE_GOAL, "at most"),
        ],
        limit=median(theirs) if theirs else None,
        problems={"nginx": problem} if problem else {},
        state_bytes=size,
        facts={"seconds": median(ours)},
    )


def _read(url: str, size: int) -> float:
    """Seconds until all readers have read the whole object."""
    command = [sys.executable, "-m", "bench.readers", url, str(size), str(READERS)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _write_shard(folder: Path, num_bytes: int) -> tuple[str, str]:
    """A checkpoint with one shard of about this size: its path in the daemon, and its key in the store."""
    weights = nn.Module()
    weights.weight = nn.Parameter(torch.randn(num_bytes // 4))
    with Checkpointer(str(folder), run="bench", compress="off", writer="thread") as checkpointer:
        checkpoint = checkpointer.save_async(weights, None, 1).result()
    key = RunKeys(checkpoint.run).shard(checkpoint.attempt, names.shard_name(0))
    return f"{bodies.CHECKPOINTS}/{checkpoint.id}/shards/{names.shard_name(0)}", key


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[str, int]]:
    """The address and the process of a daemon of the store in this folder, where its index and its cache are too."""
    port = _free_port()
    command = [sys.executable, "-m", "ckptd", "serve", "--store", f"file://{folder}/store", "--port", str(port)]
    command += [
        "--db",
        f"sqlite:///{folder}/index.db",
        "--cache",
        f"{folder}/cache",
        "--notice-seconds",
        "0",
        "--auth",
        "off",
    ]
    with _running(command, f"http://127.0.0.1:{port}/readyz", 200) as process:
        yield f"http://127.0.0.1:{port}", process


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[str]:
    """The address of nginx, which serves the files in `root`. Raises FileNotFoundError if it is not installed."""
    port = _free_port()
    (folder / "nginx").mkdir()
    user = "user root;" if os.geteuid() == 0 else ""
    configuration = folder / "nginx.conf"
    configuration.write_text(user + _NGINX.format(folder=folder / "nginx", port=port, root=root))
    command = ["nginx", "-c", str(configuration), "-p", str(folder), "-e", str(folder / "nginx" / "errors")]
    with _running(command, f"http://127.0.0.1:{port}/", 403):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _running(command: Sequence[str], url: str, status: int) -> Iterator[int]:
    """The process of a server that answers requests; stopped on exit. Raises OSError or RuntimeError if none starts."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stderr=output)
        try:
            _wait_for(process, url, status)
            yield process.pid
        finally:
            process.terminate()
            process.wait(_DEADLINE_S)


def _wait_for(process: subprocess.Popen[bytes], url: str, status: int) -> None:
    end = time.monotonic() + _DEADLINE_S
    while process.poll() is None and time.monotonic() < end:
        try:
            if httpx.get(url).status_code == status:
                return
        except httpx.HTTPError:
            pass  # not listening yet
        time.sleep(0.05)
    raise RuntimeError(f"{process.args!r} did not start: {process.poll()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _counter(url: str, name: str) -> float:
    found = re.search(rf"^{name} ([0-9.e+]+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def _row(name: str, seconds: Sequence[float], total: int, problem: str = "") -> tuple[str, ...]:
    if not seconds:
        return (name, "", "", problem)
    return (name, f"{median(seconds):.2f}", f"{total / median(seconds) / 1e9:.2f}", problem)
