"""The host memory of snapshots: how much this process may still take, and on which NUMA node it lies.

Snapshots are shared memory, which counts against the cgroup. Beyond its limit the kernel kills the trainer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

_UNLIMITED = 1 << 60
"""cgroup v1 reports a number like this if there is no limit."""
_V1 = "sys/fs/cgroup/memory"
_V2 = "sys/fs/cgroup"
_LOCAL_RANKS = (
    "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE",
)  # fmt: skip
"""The variables of torchrun, Open MPI, MPICH, PALS and srun, whose value may be 8(x2),4 for several hosts."""


def available_bytes(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int | None:
    """Memory that this rank can use without swapping and below the limits of its cgroups. None if nothing is known.

    The ranks of a host ask at the same time, so each gets an equal part; one without a launcher's variables, all. root:
    of the file system.
    """
    found = [free for free in (_system_free(root), *_cgroups_free(root)) if free is not None]
    return min(found) // local_ranks(environ) if found else None


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """The ranks of the job on this host, as the launcher says; 1 if it does not."""
    said = next(filter(None, map(environ.get, _LOCAL_RANKS)), "")
    return max(1, 1, *map(int, re.findall(r"(?:^|,)(\d+)", said)))


@contextmanager
def on_node(node: int | None, root: Path = Path("/")) -> Iterator[None]:
    """Memory that this thread populates meanwhile lies on a NUMA node: the thread runs on the cores of the node.

    Does nothing if the node is None or unknown, or if this process must not use its cores.
    """
    cores = _cores(_read(root / f"sys/devices/system/node/node{node}/cpulist"))
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # the cpuset of a container
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cores(listed: str) -> set[int]:
    """The cores in a list such as 0-3,8."""
    ranges = [part.split("-") for part in listed.strip().split(",") if part]
    return {core for bounds in ranges for core in range(int(bounds[0]), int(bounds[-1]) + 1)}


def _system_free(root: Path) -> int | None:
    # A node without cores is memory of a device (GH200), which the system counts as its own.
    nodes = [node for node in (root / "sys/devices/system/node").glob("node*") if not _read(node / "cpulist").strip()]
    free = _bytes(root / "proc/meminfo", "MemAvailable")
    return free and free - sum(_bytes(node / "meminfo", "MemFree") or 0 for node in nodes)


def _bytes(path: Path, name: str) -> int | None:
    found = re.search(rf"{name}:\s+(\d+)", _read(path))
    return found and int(found[1]) << 10


def _cgroups_free(root: Path) -> Iterator[int | None]:
    """The free memory of the cgroup of this process and in of those above it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files, top = ("memory.max", "memory.current", "inactive_file"), root / _V2
        elif "memory" in controllers.split(","):
            files, top = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), root / _V1
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        # In a container the path is often that of the host; then only the top exists.
        yield from (_left(top / folder, *files) for folder in (own, *own.parents))


def _left(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    limit, usage = _read(folder / limit_file).strip(), _read(folder / usage_file).strip()
    if not limit.isdecimal() or not usage.isdecimal() or int(limit) >= _UNLIMITED:
        return None
    stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines())
    cache = stat.get(reclaimable, "0").strip()
    return max(0, int(limit) - int(usage) + (int(cache) if cache.isdecimal() else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
