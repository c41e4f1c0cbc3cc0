"""How much memory snapshots may take: the least of system and cgroups, divided among the local ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt.host.memory import available_bytes, on_node
from ckpt.snapshot import arena
from tests.ckpt.snapshot.simulated import plugged_in

GB = 1 << 30
SYSTEM = {"proc/meminfo": f"MemTotal: {900 << 20} kB\nMemAvailable: {800 << 20} kB\n"}
V2 = {
    "proc/self/cgroup": "0::/kubepods/pod1\n",
    "sys/fs/cgroup/kubepods/pod1/memory.max": f"{64 * GB}\n",
    "sys/fs/cgroup/kubepods/pod1/memory.current": f"{40 * GB}\n",
    "sys/fs/cgroup/kubepods/pod1/memory.stat": f"anon 1\ninactive_file {8 * GB}\nactive_file 5\n",
    "sys/fs/cgroup/kubepods/memory.max": "max\n",
}
PARENT = {"sys/fs/cgroup/kubepods/memory.max": f"{48 * GB}\n", "sys/fs/cgroup/kubepods/memory.current": f"{44 * GB}\n"}
CONTAINER = {
    "proc/self/cgroup": "0::/kubepods/pod1\n",
    "sys/fs/cgroup/memory.max": f"{10 * GB}\n",
    "sys/fs/cgroup/memory.current": f"{3 * GB}\n",
}
GRACE = {
    "sys/devices/system/node/node0/cpulist": "0-71\n",
    "sys/devices/system/node/node0/meminfo": f"Node 0 MemTotal: 5 kB\nNode 0 MemFree:  {400 << 20} kB\n",
    "sys/devices/system/node/node1/cpulist": "\n",
    "sys/devices/system/node/node1/meminfo": f"Node 1 MemTotal: 5 kB\nNode 1 MemFree:  {380 << 20} kB\n",
}
"""The second node is memory of the GPU."""
V1 = {
    "proc/self/cgroup": "5:cpu:/x\n4:hugetlb,memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{20 * GB}\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{15 * GB}\n",
    "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GB}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * GB}\n",
}


CASES: dict[str, tuple[Mapping[str, str], Mapping[str, str], int | None]] = {
    "system": (SYSTEM, {}, 800 * GB),
    "local ranks": (SYSTEM, {"LOCAL_WORLD_SIZE": "8"}, 100 * GB),
    "cgroup": (SYSTEM | V2, {}, 32 * GB),
    "cgroup and ranks": (SYSTEM | V2, {"LOCAL_WORLD_SIZE": "4"}, 8 * GB),
    "parent": (SYSTEM | V2 | PARENT, {}, 4 * GB),
    "container": (SYSTEM | CONTAINER, {}, 7 * GB),
    "v1": (SYSTEM | V1, {}, 6 * GB),
    "unknown": ({}, {"LOCAL_WORLD_SIZE": "8"}, None),
    "gh200": (SYSTEM | GRACE, {}, 420 * GB),
    "mpi": (SYSTEM, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 200 * GB),
    "mpich": (SYSTEM, {"MPI_LOCALNRANKS": "4"}, 200 * GB),
    "pals": (SYSTEM, {"PALS_LOCAL_SIZE": "4"}, 200 * GB),
    "slurm": (SYSTEM, {"SLURM_STEP_TASKS_PER_NODE": "4(x2),8,2(x16)"}, 100 * GB),
    "torchrun in slurm": (SYSTEM, {"SLURM_STEP_TASKS_PER_NODE": "1", "LOCAL_WORLD_SIZE": "8"}, 100 * GB),
    "odd": (SYSTEM, {"LOCAL_WORLD_SIZE": "?"}, 800 * GB),
}


@pytest.mark.parametrize(("files", "environ", "expected"), CASES.values(), ids=CASES)
def test_available_bytes(
    files: Mapping[str, str], environ: Mapping[str, str], expected: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_bytes(tmp_path, environ) == expected


def test_this_machine_reports_something() -> None:
    assert available_bytes() is not None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinities")
def test_memory_is_populated_on_the_cores_of_a_node(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    listed = {0: f"{core}\n", 1: f"{core}-{core + 1},4000-4001\n", 2: "\n", 3: "5000-5003\n"}
    for node, cores in listed.items():
        path = tmp_path / f"sys/devices/system/node/node{node}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(cores)
    expected: dict[int | None, set[int]] = {0: {core}, 1: {core, core + 1}}
    expected |= dict.fromkeys((2, 3, 7, None), before)
    for known, allowed in expected.items():
        with on_node(known, tmp_path):
            assert os.sched_getaffinity(0) <= allowed
            assert core in os.sched_getaffinity(0)
        assert os.sched_getaffinity(0) == before


def test_slots_are_populated_on_the_node_of_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: list[int | None] = []

    @contextmanager
    def seen(node: int | None) -> Iterator[None]:
        nodes.append(node)
        yield

    monkeypatch.setattr(arena, "on_node", seen)
    with plugged_in(0) as simulated:
        simulated.node = 3
        slots = arena.Arena(2, lambda change, segment: None)
        slots.expect(1 << 20, torch.device("cpu"), wait=True)
        slots.close()
    assert set(nodes) == {3}
