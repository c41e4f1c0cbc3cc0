"""CPU time of the training thread for each leaf of a save on a GPU, with a thread of this process in place of the GPU.

A save looks at every leaf, so many small ones are its worst case: a parameter of 64 elements, two moments and a step.
Each round opens a Checkpointer, trains, and saves after each step. The first overlapped save of a layout plans the
copies, and the first two are watched more closely, so they are reported apart. Time of the thread, not of the clock:
other load of the machine does not count, except for what it evicts from the caches.

snapshot: from the captured state to the return of the copy. call: all of `save_async`, which in the first save also
describes the state of the optimizer.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from bench.report import Goal, Report
from ckpt import Checkpointer
from ckpt.device import DEVICES, Addresses, Device, Mark, digests, rows
from ckpt.snapshot import run_saves
from ckpt.snapshot.run_saves import take_snapshot

LEAVES = (1268, 10_000)
_LEAVES_PER_PARAMETER = 4
_ELEMENTS = 64
QUICK_ROUNDS, _ROUNDS = 3, 7
_SAVES = ("first", "second", "third", "fourth", "fifth", "sixth")
_LATER = "later"
GOAL_US = 1.2

Seconds = dict[tuple[int, str, str], list[float]]
"""By number of leaves, save, and part of it."""


def measure(quick: bool) -> Report:
    """Measure with few and many leaves in turns."""
    torch.set_num_threads(1)
    found: Seconds = defaultdict(list)
    for _ in range(QUICK_ROUNDS if quick else _ROUNDS):
        for num_leaves in LEAVES:
            _round(num_leaves, found)
    per_leaf = {key: [1e6 * each / key[0] for each in seconds] for key, seconds in found.items()}
    least = {(n, save): min(values) for (n, save, part), values in per_leaf.items() if part == "snapshot"}
    return Report(
        bench="leaves",
        what=f"CPU time of the training thread per leaf of {_ELEMENTS} elements, median (least)",
        columns=("leaves", "save", "snapshot us", "call us"),
        rows=[
            (str(n), save, _shown(values), _shown(per_leaf[n, save, "call"]))
            for (n, save, part), values in per_leaf.items()
            if part == "snapshot"
        ],
        goals=[
            Goal(f"{save} save, {n} leaves", f"{GOAL_US} us per leaf", us / GOAL_US, 1.0, "at most")
            for (n, save), us in least.items()
        ],
        limit=GOAL_US,
        state_bytes=LEAVES[-1] * _ELEMENTS * 4,
        facts={f"{n} leaves, {save} save, {part}": median(values) for (n, save, part), values in per_leaf.items()},
    )


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f})"


def _round(num_leaves: int, found: Seconds) -> None:
    """A Checkpointer, from the first save on."""
    model = nn.ParameterList(nn.Parameter(torch.ones(_ELEMENTS)) for _ in range(num_leaves // _LEAVES_PER_PARAMETER))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    snapshots: list[float] = []

    def timed(*arguments: Any) -> bool:
        began = time.thread_time()
        taken = take_snapshot(*arguments)
        snapshots.append(time.thread_time() - began)
        return taken

    with (
        _plugged_in(),
        patch.object(run_saves, "take_snapshot", timed),
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, run="leaves", slots=1, compress="off", max_references=0) as checkpointer,
    ):
        checkpointer.prepare(model, optim)
        for step, name in enumerate(_SAVES):
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optim.step()
            began = time.thread_time()
            handle = checkpointer.save_async(model, optim, step)
            called = time.thread_time() - began
            handle.result()
            save = name if step < 3 else _LATER
            found[num_leaves, save, "call"].append(called)
            found[num_leaves, save, "snapshot"].append(snapshots[-1])


class _Done(Mark):
    """A point in the work of the thread."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def done(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True


class _ThreadDevice(Device):
    """A thread that executes what is queued, in order. Queueing costs what it costs for a GPU, without its driver."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self._thread = thread

    def current(self) -> Hashable:
        return 0

    def mark(self, side: bool) -> _Done:
        return _Done(self._thread.submit(bool))

    def wait(self, mark: Mark, side: bool) -> None:
        pass

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        if tensors:
            self._queue(lambda: torch._foreach_copy_(list(views), list(tensors)))

    def run(self, work: Callable[[], object]) -> None:
        self._queue(work)

    def gather(self, tensors: Sequence[torch.Tensor], side: bool) -> torch.Tensor:
        flat = list(map(torch.ravel, tensors))
        memory = torch.empty(sum(map(torch.Tensor.numel, flat)), dtype=flat[0].dtype)
        self._queue(lambda: torch.cat(flat, out=memory))
        return memory

    def read(self, addresses: Addresses, size: int) -> torch.Tensor:
        first, end = int(addresses.min()), int(addresses.max()) + size
        offsets = torch.from_numpy(np.subtract(addresses, first))
        spanning = torch.frombuffer((ctypes.c_char * (end - first)).from_address(first), dtype=torch.uint8)
        memory = self.pinned(len(addresses) * size).view(-1, size)
        self._queue(lambda: memory.copy_(rows(spanning, offsets, size)))
        return memory

    def digest(self, into: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        self._queue(lambda: into.copy_(digests(tensors)))

    def free_bytes(self) -> int:
        return 1 << 40

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def pin(self, address: int, num_bytes: int) -> int:
        return 0

    def unpin(self, address: int) -> int:
        return 0

    def crosses(self, address: int) -> bool:
        return True

    def numa_node(self) -> int | None:
        return None

    def _queue(self, operation: Callable[[], object]) -> None:
        self._thread.submit(torch.no_grad()(operation))


@contextmanager
def _plugged_in() -> Iterator[None]:
    """The thread in place of the CPU, whose tensors count as those of a GPU."""
    with ThreadPoolExecutor(1, thread_name_prefix="device") as thread, patch.dict(DEVICES):
        DEVICES["cpu"] = lambda _: _ThreadDevice(thread)
        yield
