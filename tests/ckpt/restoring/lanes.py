"""Lanes to host memory, for tests of landing: each has a thread that does its work as late as it may."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ckpt.restoring import gpu_copy as landing
from ckpt.restoring.buffers import CopyFence
from ckpt.restoring.gpu_copy import LANES

_PATIENCE_S = 60


class LazyLane:
    """What a stream is to a GPU. Its thread starts when another one waits for it, and does no more than is needed:
    memory that is used again too early has other bytes by then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.staged: list[int] = []
        """Sizes of the buffers that were made."""
        self.ends = 0
        self.failing: Exception | None = None
        """What all work from now on raises."""
        self._changed = threading.Condition()
        self._work: list[Callable[[], None]] = []
        self._wanted = self._done = 0
        self._error: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._go_on, name="lazy-lane")
        self._thread.start()

    def begin(self) -> None:
        self._wait(len(self._work))

    def staging(self, num_bytes: int) -> torch.Tensor:
        self.staged.append(num_bytes)
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)

    def fence(self) -> CopyFence:
        with self._changed:
            return _LaneMark(self, len(self._work))

    def end(self) -> None:
        self.ends += 1
        self._wait(len(self._work))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _wait(self, number: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._done >= number, _PATIENCE_S)
            if self._error is not None:
                raise self._error

    def _go_on(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._done < self._wanted)
                if self._closed:
                    return
                work = self._work[self._done]
            try:
                if self.failing is not None:
                    raise self.failing
                work()
            except Exception as error:
                self._error = error
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class _LaneMark:
    def __init__(self, lane: LazyLane, number: int) -> None:
        self._lane = lane
        self._number = number

    def done(self) -> bool:
        return self._lane._done >= self._number

    def wait(self) -> None:
        self._lane._wait(self._number)


@contextmanager
def lazy_lanes(failing: Exception | None = None, buffer_bytes: int = 64 << 10) -> Iterator[list[LazyLane]]:
    """Restores to host memory go by lanes, and through three small buffers each, unless chunks are larger. Yields the
    lanes as they are made."""
    lanes: list[LazyLane] = []

    def make(device: torch.device) -> LazyLane:
        lanes.append(LazyLane(device))
        lanes[-1].failing = failing
        return lanes[-1]

    with (
        patch.dict(LANES, {"cpu": make}),
        patch.object(landing, "CHUNK_BYTES", buffer_bytes),
        patch.object(landing, "NUM_BUFFERS", 3),
    ):
        try:
            yield lanes
        finally:
            for lane in lanes:
                lane.close()
