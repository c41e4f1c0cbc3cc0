"""How fast a client of the Hub gets a file of weights from the daemon, against nginx serving the exported file.

One connection downloads the whole file and discards it, in turns; what the daemon sends, it makes of verified chunks.
For float-split the limit is the decoder: the same tensors are loaded into memory, by all cores, without HTTP. Then a
file of 8 GB is downloaded once, while the memory of the daemon is watched: zeros, which take little space in the store.
"""

from __future__ import annotations

import http.client
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

import ckpt
from bench.daemon_read import daemon, nginx
from bench.measuring import REPETITIONS, SAMPLE_S, in_turns, memory_bytes, problem
from bench.report import Goal, Report
from bench.state import trained, wanted_bytes
from ckpt import Checkpointer
from ckptstore.reading.safetensors import plan_file

RAW_GOAL = 0.45
"""Throughput over nginx's."""
DECODER_GOAL = 0.8
"""Throughput, divided by the throughput of the decoder alone."""
MEMORY_GOAL = 256 << 20
"""Bytes by which the daemon may grow, whatever the size of the file."""
LARGE_BYTES = 8 << 30
_FILE = "resolve/main/model.safetensors"


class Download(NamedTuple):
    """Seconds of one download."""

    first: float
    """Until the first byte of the body."""
    whole: float


def measure(quick: bool) -> Report:
    """Measure over a folder of the default temporary file system."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        size = _write(folder, wanted_bytes(quick))
        url, process = stack.enter_context(daemon(folder))
        before = memory_bytes(process)
        contestants = {run: f"{url}/hf/runs/{run}/{_FILE}" for run in ("raw", "split")}
        problems = dict[str, str]()
        try:
            contestants["nginx"] = stack.enter_context(nginx(folder, folder / "files")) + "/model.safetensors"
        except (OSError, RuntimeError) as error:
            problems["nginx"] = problem(error)
        for address in contestants.values():
            _download(address)
        downloads: dict[str, Callable[[], Download]] = {run: partial(_download, at) for run, at in contestants.items()}
        downloads["decoder"] = partial(_load, folder)
        found, failed = in_turns(downloads)
        peak, large_bytes, took = _large(folder, url, process, LARGE_BYTES // (32 if quick else 1))
    grown = peak - before
    whole = {one: median(download.whole for download in downloads) for one, downloads in found.items()}
    goals = [
        Goal("throughput, float-split", "decoder", whole["decoder"] / whole["split"], DECODER_GOAL, "at least"),
        Goal("memory, large file", "256 MiB", grown / MEMORY_GOAL, 1, "at most"),
    ]
    if "nginx" in whole:
        goals.insert(0, Goal("throughput, raw", "nginx", whole["nginx"] / whole["raw"], RAW_GOAL, "at least"))
    return Report(
        bench="hub-read",
        what=f"one file of {size / 1e6:.0f} MB, warm; median of {REPETITIONS} in turns",
        columns=("", "first byte, ms", "seconds", "GB/s"),
        rows=[
            *(_row(one, median(download.first for download in found[one]), whole[one], size) for one in whole),
            _row(f"zeros; memory {grown / 1e6:+.0f} MB", took.first, took.whole, large_bytes),
        ],
        goals=goals,
        limit=whole.get("nginx"),
        problems={**problems, **failed},
        state_bytes=size,
        facts={"memory_growth": grown, "first_byte": median(d.first for d in found["raw"])},
    )


def _row(name: str, first: float, whole: float, size: int) -> tuple[str, ...]:
    return name, f"{1e3 * first:.1f}" if first else "", f"{whole:.2f}", f"{size / whole / 1e9:.2f}"


def _write(folder: Path, num_bytes: int) -> int:
    """The checkpoints of the runs `raw` and `split`, and the same weights as a file; returns its size."""
    model = trained("fp32", num_bytes).model
    store = str(folder / "store")
    for checkpointer in (
        Checkpointer(store, run="raw", compress="off"),
        Checkpointer(store, run="split", compress="fast"),
    ):
        with checkpointer:
            checkpointer.save(model, None, 1)
    _ckptctl("export", "raw", "--to", str(folder / "files"), "--format", "huggingface", "--store", store)
    return (folder / "files" / "model.safetensors").stat().st_size


def _ckptctl(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "ckptctl", *arguments], check=True, stdout=subprocess.DEVNULL)


def _download(url: str) -> Download:
    """The whole of a file, discarded. Raises OSError or HTTPException."""
    parts, buffer = urlsplit(url), bytearray(1 << 20)
    connection = http.client.HTTPConnection(parts.netloc)
    began = time.perf_counter()
    connection.request("GET", parts.path)
    with connection.getresponse() as response:
        if response.status != 200:
            raise OSError(f"{url} answers {response.status}")
        got = len(response.read(1))
        first = time.perf_counter() - began
        while count := response.readinto(buffer):
            got += count
        if got != int(response.headers["Content-Length"]):
            raise OSError(f"{url} ended after {got} bytes")
    connection.close()
    return Download(first, time.perf_counter() - began)


def _load(folder: Path) -> Download:
    began = time.perf_counter()
    ckpt.load(f"{folder}/store/split@1", names="model/*")
    return Download(0.0, time.perf_counter() - began)


def _large(folder: Path, url: str, process: int, num_bytes: int) -> tuple[int, int, Download]:
    """The most memory of the daemon while a large file is downloaded, the size of the file, and how long it takes."""
    path = folder / "large.safetensors"
    header, _, size = plan_file([("zeros", "float32", (num_bytes // 4096, 1024))], {})
    with path.open("wb") as file:
        file.write(header)
        file.truncate(size)
    _ckptctl("import", str(path), "large@1", "--store", f"{folder}/store")
    while httpx.get(f"{url}/hf/api/models/runs/large").status_code != 200:
        time.sleep(0.1)  # until the daemon has listed the store
    with _watched(process) as peak:
        took = _download(f"{url}/hf/runs/large/{_FILE}")
    return peak[0], size, took


@contextmanager
def _watched(process: int) -> Iterator[list[int]]:
    """The most memory of a process and those under it so far."""
    peak, ended = [memory_bytes(process)], threading.Event()

    def look() -> None:
        while not ended.wait(SAMPLE_S):
            peak[0] = max(peak[0], memory_bytes(process))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()
