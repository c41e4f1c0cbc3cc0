"""How long save_async holds up training, against one memcpy of the same bytes, and what memory it takes.

The two are measured in turns, because the speed of memory drifts on shared machines, and both go into memory that
was touched before. The first save, which makes the shared memory, is reported apart. Memory is the sum of the
proportional set sizes of trainer and saver, sampled in a save of its own, which is not timed.
"""

from __future__ import annotations

import ctypes
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import nn

from bench.report import Goal, Report
from ckpt import Checkpointer
from ckptstore.clock import system_clock
from ckptstore.deletion import delete_checkpoint
from ckptstore.stores import open_store

GOAL = 1.3
EXTRA_BYTES = 256 << 20
REPETITIONS = 7
TENSORS = 50


class Weights(nn.Module):
    """A state of the given size, in fifty tensors."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(0.02 * torch.randn(num_bytes // 4 // TENSORS) for _ in range(TENSORS))


class Saving:
    """Saves that leave nothing on the disk and never wait for each other."""

    def __init__(self, checkpointer: Checkpointer, url: str, model: nn.Module) -> None:
        self.checkpointer = checkpointer
        self.store = open_store(url)
        self.model = model
        self.steps = 0

    def once(self) -> float:
        """Seconds inside save_async; returns when the checkpoint is durable and deleted again."""
        self.steps += 1
        began = time.perf_counter()
        handle = self.checkpointer.save_async(self.model, None, self.steps)
        blocked = time.perf_counter() - began
        delete_checkpoint(self.store, handle.result(), "bench", system_clock)
        return blocked


def measure(quick: bool) -> Report:
    """Measure on a folder of the default temporary file system."""
    num_bytes = 10**8 if quick else 10**9
    model = Weights(num_bytes)
    target = torch.ones(num_bytes // 4)
    before = memory_bytes(None)
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, run="bench", slots=1) as checkpointer:
        saving = Saving(checkpointer, folder, model)
        first = saving.once()
        copies, saves = [], []
        for _ in range(REPETITIONS):
            copies.append(copy(model, target))
            saves.append(saving.once())
        with peak_memory(checkpointer) as peak:
            saving.once()
    extra = peak[0] - before
    return Report(
        bench="stall",
        what=f"{num_bytes / 1e9:.1f} GB on the CPU, {REPETITIONS} repetitions in turns, one slot",
        columns=("", "median", "least", "most"),
        rows=[
            ("memcpy", *spread(copies)),
            ("save_async", *spread(saves)),
            ("first save_async", f"{first:.4f} s", "", ""),
            ("extra memory", f"{extra / 1e6:.0f} MB", "", ""),
        ],
        goals=[
            Goal("save_async", "memcpy", median(saves) / median(copies), GOAL, "at most"),
            Goal("extra memory", "one state and 256 MiB", extra / (num_bytes + EXTRA_BYTES), 1.0, "at most"),
        ],
        limit=median(copies),
        state_bytes=num_bytes,
        facts={"memcpy_s": median(copies), "save_async_s": median(saves), "first_s": first, "extra_bytes": extra},
    )


def copy(model: Weights, target: torch.Tensor) -> float:
    """Seconds of libc's memcpy of all weights, one after the other."""
    sources = [(weight.data_ptr(), weight.nbytes) for weight in model.weights]
    at = target.data_ptr()
    began = time.perf_counter()
    for source, size in sources:
        ctypes.memmove(at, source, size)
        at += size
    return time.perf_counter() - began


def spread(seconds: list[float]) -> tuple[str, str, str]:
    """Median, least and most."""
    return f"{median(seconds):.4f} s", f"{min(seconds):.4f} s", f"{max(seconds):.4f} s"


def memory_bytes(saver: int | None) -> int:
    """Proportional set size of this process and the saver: what is shared counts once."""
    total = 0
    for process in ("self", saver):
        if process is not None:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            total += 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


@contextmanager
def peak_memory(checkpointer: Checkpointer) -> Iterator[list[int]]:
    """One number, at the end: the most memory seen inside the block."""
    peak = [0]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], memory_bytes(checkpointer.saver_pid))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
