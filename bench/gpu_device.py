"""CUDA as far as the benchmark of GPUs uses it, and the second process that launches beside it.

python -m bench.gpu_device DEVICE    launch until the input ends; print the longest pause in seconds
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

_CYCLES_PER_S = 1.7e9


class Stamp(Protocol):
    """A point in the work of the device."""

    def seconds_until(self, later: Stamp) -> float:
        """Seconds that the device took from here to there. Waits for it."""


class Gpu:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = torch.cuda.get_device_name()

    def synchronize(self) -> None:
        """Wait until everything queued is done."""
        torch.cuda.synchronize()

    def stamp(self) -> Stamp:
        """A point after everything queued so far on the current stream."""
        return _Event()

    def occupy(self, seconds: float) -> None:
        """The current stream does nothing else for about this long."""
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record()

    def seconds_until(self, later: Stamp) -> float:
        assert isinstance(later, _Event)
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1000


class Launcher:
    """A process that launches small kernels and waits for each. `pause_s` is its longest pause, at the end."""

    pause_s = 0.0


@contextmanager
def launching(device: torch.device) -> Iterator[Launcher]:
    """It runs during the block."""
    found = Launcher()
    command = [sys.executable, "-m", "bench.gpu_device", str(device)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{' '.join(command)} ended")
            yield found
            found.pause_s = float(process.communicate("\n", timeout=60)[0])
        finally:
            process.kill()


def _launch(device: torch.device) -> float:
    """The longest pause until a line is read from the input."""
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.readline()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    small, longest = torch.zeros(1024, device=device), 0.0
    small.add_(1).sum().item()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    before = time.perf_counter()
    while True:
        small.add_(1).sum().item()
        before, longest = time.perf_counter(), max(longest, time.perf_counter() - before)
        if ended.is_set():
            return longest


if __name__ == "__main__":
    sys.stdout.write(f"{_launch(torch.device(sys.argv[1]))}\n")
