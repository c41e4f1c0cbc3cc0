"""The way into the memory of a GPU: a stream of its own, and pinned memory that copies start from.

Nothing of CUDA is touched before a lane is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ckpt.restoring.buffers import CopyFence
from ckpt.streams import on_stream, side_stream

logger = logging.getLogger(__name__)


class CudaLane:
    """Copies to one GPU, in the order in which they were asked for. begin and end belong to the restoring thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = side_stream(device)

    def begin(self) -> None:
        """Order the lane after all work queued on the current stream: the memory to be written may still be in use."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def staging(self, num_bytes: int) -> torch.Tensor:
        """Pinned memory, or pageable memory with a warning if pinning fails: copies then take longer.

        torch caches pinned memory that is no longer used for the next allocation.
        """
        with torch.cuda.device(self._device):
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                logger.warning("cannot pin %d bytes, so the restore takes longer: %s", num_bytes, error)
                return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def run(self, work: Callable[[], None]) -> None:
        """Queue the operations of `work` on the GPU; returns at once."""
        with on_stream(self._stream):
            work()

    def fence(self) -> CopyFence:
        """A fence after all work queued so far."""
        return _EventMark(self._stream)

    def end(self) -> None:
        """Order later work on the current stream after all work queued here. Does not wait."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # A thread that waits for it sleeps instead of spinning.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()
