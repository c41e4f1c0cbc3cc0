"""Restores to host memory in the way of restores to a GPU: copies end late, and go through three small buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from ckpt.capture.parts import TensorPart, TensorPiece
from ckpt.device import Mark
from ckpt.restoring import gpu_copy
from ckpt.restoring.destinations import Destinations
from ckptstore.names import Reference
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
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


def check_slices(store: str, step: int, name: str, whole: torch.Tensor, device: str = "cpu") -> None:
    """Slices of a tensor of the model arrive in a part of another one, turned, in another type and in host memory."""
    source, rows = StoreSource(open_store(store)), whole.shape[0]
    checkpoint = source.find(Reference("r", step))
    content = read_manifest(source, checkpoint).content
    columns, host = torch.zeros(rows, 100, device=device), torch.ones(64, 80)
    turned, again = torch.zeros(80, 64, device=device).t(), torch.zeros(64, 80, device=device).double()
    box = (96, 100, 64, 80)
    pieces = [TensorPiece((0, 3, rows, 50), columns[:, 50:]), *(TensorPiece(box, one) for one in (turned, again, host))]
    destinations = Destinations(content)
    destinations.fill(f"model/{name}", TensorPart(tuple(whole.shape), torch.float32, tuple(pieces)))
    destinations.allocate()
    with destinations.receiving() as buffers:
        fetch(source, checkpoint, destinations.reads, buffers)
    destinations.place()
    assert torch.equal(columns[:, 50:], whole[:, 3:53])
    assert columns[:, :50].eq(0).all()
    for one in (turned, again, host):
        assert torch.equal(one.to(device), whole[96:160, 100:180].to(one.dtype))
