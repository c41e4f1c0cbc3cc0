"""A side stream per GPU, for copies concurrent with training. CUDA is not initialized before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckpt.lazily import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a GPU; streams are never freed, so all copies share one. For any thread."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return stream


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Like `torch.cuda.stream`, for threads that have not set a device.

    Their current device is 0, and torch.cuda.stream alone would switch back to it at the end. That would create a
    context of hundreds of megabytes on GPU 0 for every process that uses another GPU.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
