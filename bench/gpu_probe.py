"""python -m bench.gpu_probe [-o json] [--only STEP ...]: a GPU and its machine, expected and found.

Run it first where ckptd has not run yet; about half an hour. A row that differs says what it means. Exits with 0 if
every row is as expected, with 1 if one is not, with 2 if torch finds no CUDA device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from bench import machine
from bench.gpu_device import Gpu
from ckpt import Checkpointer
from ckpt.device import DEVICES, Device
from ckpt.host.memory import available_bytes
from ckpt.host.segment import Segment, populate
from ckpt.snapshot.device_copies import PIN_BYTES, pin_segment
from ckptstore.errors import SaveFailed

ROOT = Path(__file__).parents[1]
GPU_TESTS = (
    "tests/ckpt/snapshot/test_training_gpu.py",
    "tests/ckpt/restoring/test_restore_gpu.py",
    "tests/ckpt/test_resume.py",
)
ALLOCATORS = ("", "expandable_segments:True", "backend:cudaMallocAsync")
_LAUNCHES = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """One fact."""

    what: str
    expected: str
    found: str
    ok: bool | None = None  # None: for information
    means: str = ""  # what a difference means


def pytest_command(*files: str) -> list[str]:
    """Tests that need a GPU, without options of plugins that a machine may not have."""
    options = ["-o", "addopts=--import-mode=importlib", "-o", "tmp_path_retention_policy=all", "--noconftest"]
    plugin = ["-p", "tests.ckpt.snapshot.conftest"]
    return [
        sys.executable,
        "-m",
        "pytest",
        *options,
        *plugin,
        "-W",
        "default",
        "-m",
        "gpu",
        "-q",
        *(files or GPU_TESTS),
    ]


def look_at_machine(gpu: Gpu) -> Iterator[Row]:
    """Driver, memory and limits."""
    yield Row("machine", "", f"{machine.describe()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    query = "name,driver_version,mig.mode.current,pcie.link.gen.current,pcie.link.width.current"
    said = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    yield Row("GPU", "", said or gpu.name)
    confidential = re.search(r"CC State\s*:\s*(\w+)", _output("nvidia-smi", "conf-compute", "-f"))
    on = bool(confidential and confidential[1] == "ON")
    yield Row("confidential computing", "off", "on" if on else "off", not on, "pinning is refused: 1 to 3 GB/s")
    shared = shutil.disk_usage("/dev/shm").free / 1e9
    yield Row("free in /dev/shm", ">= 26 GB", f"{shared:.0f} GB", shared >= 26, "bench measures a disk")
    memory = (available_bytes(environ={}) or 0) / 1e9
    yield Row("host memory below the cgroup's limit", ">= 20 GB", f"{memory:.0f} GB", memory >= 20, "bench has no slot")


def look_at_driver(gpu: Gpu, num_bytes: int = 1 << 30, busy_s: float = 3.0, leaves: int = 2000) -> Iterator[Row]:
    """Pinning, copies across pieces, the launch queue, memory that is free, a device that is stuck."""
    device = DEVICES[gpu.device.type](gpu.device)
    yield Row("NUMA node", "0, 1, ... or None", str(device.numa_node()))
    yield from _pinning(gpu, device, num_bytes)
    yield from _launches(gpu, device, busy_s)
    yield from _stuck(gpu, 10 * busy_s, leaves)
    if gpu.device.type == "cuda":
        yield from _graphs(device, num_bytes)


def _pinning(gpu: Gpu, device: Device, num_bytes: int) -> Iterator[Row]:
    pin_segment(Segment(PIN_BYTES), device)  # the first call takes longer
    segment = Segment(num_bytes)
    populate(segment)
    began = time.perf_counter()
    pinned = pin_segment(segment, device)
    took = (time.perf_counter() - began) * 1000 * PIN_BYTES / num_bytes
    yield Row("memory can be pinned", "yes", "yes" if pinned else "no", pinned, "copies pass through a ring of 32 MiB")
    yield Row("pinning 256 MiB", "15 to 40 ms", f"{took:.0f} ms", took <= 60, "launches of the whole host pause longer")
    if not pinned:
        return
    borders = all(device.crosses(ctypes.addressof(segment.map) + at) for at in range(PIN_BYTES, num_bytes, PIN_BYTES))
    yield Row("copies cross the borders of pieces", "yes", "yes" if borders else "no", borders, "pinned in one piece")
    tensor = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=gpu.device)
    view = torch.frombuffer(segment.map, dtype=torch.uint8)[:num_bytes]
    gpu.synchronize()
    gpu.occupy(0.2)
    began = time.perf_counter()
    device.copy([view], [tensor], side=False)
    took = (time.perf_counter() - began) * 1000
    gpu.synchronize()
    began = time.perf_counter()
    device.copy([view], [tensor], side=False)
    gpu.synchronize()
    rate = num_bytes / (time.perf_counter() - began) / 1e9
    same = torch.equal(view, tensor.cpu())
    yield Row("a copy of 1 GiB behind other work returns in", "< 1 ms", f"{took:.2f} ms", took < 1, "not asynchronous")
    yield Row("its bytes are equal", "yes", "yes" if same else "no", same, "no save of this machine is right")
    yield Row("its rate", "24 GB/s (PCIe 4), 52 (PCIe 5)", f"{rate:.1f} GB/s", rate > 20, "another NUMA node")


def _launches(gpu: Gpu, device: Device, busy_s: float) -> Iterator[Row]:
    """How many launches are pending before one blocks, and whether it blocks those of other streams."""
    small, host = torch.zeros(8, device=gpu.device), device.pinned(32).view(torch.float32)
    gpu.synchronize()
    gpu.occupy(busy_s)
    took: list[float] = []
    while len(took) < _LAUNCHES and max(took, default=0) < 1:
        began = time.perf_counter()
        device.copy([host], [small], side=len(took) == 768)
        took.append((time.perf_counter() - began) * 1000)
    gpu.synchronize()
    other = f"{took[768]:.2f} ms" if len(took) > 768 else "not reached"
    yield Row("launches until one blocks", "about 1000", f"{len(took)}", len(took) > 768, "as many may be pending")
    yield Row("a launch on another stream after 768", "< 1 ms", other, len(took) > 769, "saves delay training")


def _stuck(gpu: Gpu, busy_s: float, leaves: int) -> Iterator[Row]:
    """close() beside a device that finishes nothing."""
    model = nn.ParameterList(torch.ones(1 << 14, device=gpu.device) for _ in range(leaves // 4))
    optim = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        checkpointer = Checkpointer(folder, run="gpu", compress="off")
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optim.step()
        checkpointer.prepare(model, optim)
        optim.step()
        gpu.synchronize()
        gpu.occupy(busy_s)
        began = time.perf_counter()
        checkpointer.save_async(model, optim, 1)
        stall = (time.perf_counter() - began) * 1000
        saver = Path("/proc", str(checkpointer.saver_pid))
        with suppress(SaveFailed, TimeoutError):
            checkpointer.close(1.0)
        took = time.perf_counter() - began
        gpu.synchronize()
        while saver.exists():  # it goes on by itself and writes to the folder
            time.sleep(0.01)
    yield Row("save_async of many leaves, GPU busy", "< 10 ms", f"{stall:.1f} ms", stall < 10, "it waits for the GPU")
    yield Row("close(1) while the device is stuck", "< 10 s", f"{took:.1f} s", took < 10, "a launch blocks for ever")


def _graphs(device: Device, num_bytes: int) -> Iterator[Row]:
    """The pool of a graph is not free; a graph can be captured after the first save."""
    torch.cuda.empty_cache()  # as a capture does
    before, graph = device.free_bytes(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ones(num_bytes // 4, device="cuda").add_(1)
    less = before - device.free_bytes()
    yield Row("free memory shrinks by the pool of a graph", ">= its size", f"{less / num_bytes:.2f}", less >= num_bytes)
    model = nn.Linear(2048, 2048, device="cuda")
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(8, 2048, device="cuda"))  # cuBLAS cannot begin in a capture
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, run="gpu") as checkpointer:
        checkpointer.save_async(model, optim, 1)
        checkpointer.wait()
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                model(torch.ones(8, 2048, device="cuda"))
            said = "works"
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
    yield Row("a capture after save_async() and wait()", "works", said, said == "works", "pinning ends captures")


def run_tests(gpu: Gpu) -> Iterator[Row]:
    """The tests that need a GPU, under three allocators; and under a checker of memory."""
    for allocator in ALLOCATORS:
        done = _run(pytest_command(), PYTORCH_CUDA_ALLOC_CONF=allocator)
        last = done.stdout.strip().rpartition("\n")[2]
        name = f"tests, {allocator or 'default allocator'}"
        yield Row(name, "all pass", last, done.returncode == 0, done.stdout[-500:])
    if (tool := shutil.which("compute-sanitizer")) is not None:
        done = _run([tool, *pytest_command(GPU_TESTS[0]), "-k", "reads_of_the_gpu or many_small"])
        found = re.findall(r"ERROR SUMMARY: (\d+)", done.stdout)
        summary = " ".join(found) or "no report"
        yield Row("errors of compute-sanitizer", "0", summary, set(found) == {"0"}, done.stdout[-500:])


def run_bench(gpu: Gpu) -> Iterator[Row]:
    """`python -m bench.gpu` as a process of its own, goal by goal."""
    done = _run([sys.executable, "-m", "bench.gpu"])
    path = Path(done.stdout.strip().rpartition("\n")[2])  # its last line
    if done.returncode or not path.is_file():
        yield Row("bench.gpu", "runs", f"exit code {done.returncode}", False, done.stdout[-500:])
        return
    for goal in json.loads(path.read_text())["goals"]:
        expected = f"{goal['direction']} {goal['goal']}"
        yield Row(f"{goal['name']} / {goal['vs']}", expected, f"{goal['ratio']:.3f}", goal["ok"], str(path))


STEPS: dict[str, Callable[[Gpu], Iterator[Row]]] = {
    "machine": look_at_machine, "driver": look_at_driver, "tests": run_tests, "bench": run_bench,
}  # fmt: skip


def main() -> None:
    """Run the steps, or exit with the reason."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_probe", description=__doc__)
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    parser.add_argument("--only", nargs="+", choices=list(STEPS), default=list(STEPS), help="these steps")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("there is nothing to probe: torch finds no CUDA device\n")
        sys.exit(2)
    gpu, rows = Gpu(), list[Row]()
    for row in chain.from_iterable(STEPS[name](gpu) for name in args.only):
        rows.append(row)
        if args.output == "table":
            sys.stdout.write(line(row))
            sys.stdout.flush()
    if args.output == "json":
        sys.stdout.write(json.dumps({"gpu": gpu.name, "rows": list(map(asdict, rows))}, indent=1) + "\n")
    sys.exit(any(row.ok is False for row in rows))


def line(row: Row) -> str:
    """A line of the table: verdict, fact, expected, found, and what a difference means."""
    verdict, means = {None: ("    ", ""), True: ("ok  ", ""), False: ("MISS", f"    {row.means}")}[row.ok]
    return f"{verdict} {row.what:48} {row.expected:30} {row.found}{means}\n"


def _run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "client"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    together = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environ}
    return subprocess.run(command, cwd=ROOT, env=together, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
