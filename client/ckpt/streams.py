"""One more stream per GPU, for copies beside training. Nothing of CUDA is touched before the first is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_streams: dict[torch.device, torch.cuda.Stream] = {}


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a GPU; streams are not given back, so all copies share one. For any thread."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    return stream


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """As `torch.cuda.stream`, for threads that never chose a device.

    To these device 0 is the current one, and torch.cuda.stream alone would go back there at the end: that makes a
    context on GPU 0, hundreds of megabytes, for every process that works on another one.
    """
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
