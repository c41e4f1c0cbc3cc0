"""Restores to host memory in the way of restores to a GPU: copies end late, and go through three small buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ckpt.device import Mark
from ckpt.restoring import gpu_copy
from tests.ckpt.snapshot.simulated import DEFAULT, SimulatedDevice, plugged_in

BUFFER_BYTES = 64 << 10


class ReceivingDevice(SimulatedDevice):
    """Copies to it begin when somebody waits for one of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.staged: list[int] = []
        """Sizes of the buffers that were made."""
        self.ends = 0
        """How often the default stream was ordered after the copies."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        if num_bytes >= BUFFER_BYTES:
            self.staged.append(num_bytes)
        return super().pinned(num_bytes).fill_(0xEE)

    def wait(self, mark: Mark, side: bool) -> None:
        self.ends += not side and self.current() == DEFAULT
        super().wait(mark, side)


@contextmanager
def receiving(kind: type[ReceivingDevice] = ReceivingDevice) -> Iterator[ReceivingDevice]:
    """Tensors of the CPU are those of a simulated device, which restores reach through small buffers, unless chunks are
    larger."""
    with (
        plugged_in(0, kind) as device,
        patch.object(gpu_copy, "CHUNK_BYTES", BUFFER_BYTES),
        patch.object(gpu_copy, "NUM_BUFFERS", 3),
    ):
        assert isinstance(device, ReceivingDevice)
        yield device
