"""Leaves that a device gathers in memory of its own before it copies them to the host.

Small ones, because every copy to the host is a launch: together they are one copy, from which the CPU moves each to its
place. And state that cannot wait at the gate: training changes it while the gathered bytes are copied.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from ckpt.device import Device
from ckpt.lazily import torch

SMALL_BYTES = 64 << 10
_TOGETHER_BYTES = 64 << 20
"""Leaves of one type are gathered up to this size, larger ones alone."""

Pairs: TypeAlias = "tuple[list[torch.Tensor], list[torch.Tensor]]"
"""Copy to, and copy from."""


def by_size(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """The small ones, if there are several, and the rest."""
    found: tuple[Pairs, Pairs] = (([], []), ([], []))
    for view, tensor in zip(*pairs, strict=True):
        views, tensors = found[view.nbytes > SMALL_BYTES]
        views.append(view)
        tensors.append(tensor)
    return found if len(found[0][0]) > 1 else (([], []), pairs)


class GatheredLeaves:
    """Leaves in memory of the device. `copy` once, then `place` when the device has finished."""

    def __init__(self, device: Device, pairs: Pairs, side: bool) -> None:
        """Queue the gathering on the side stream or on the current stream. Raises RuntimeError without memory."""
        self._device = device
        self._groups: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        """The places of leaves, and their elements one after the other."""
        self._moves: list[tuple[int, int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._lock = threading.Lock()
        for views, tensors in _groups(pairs):
            self._groups.append((views, device.gather(tensors, side)))

    def copy(self, side: bool) -> None:
        """Queue the copies to the host."""
        for views, gathered in self._groups:
            memory = self._landing(views, gathered)
            if memory is None:
                flat = [view.view(-1) for view in views]
                self._device.copy(flat, torch.split(gathered, [view.numel() for view in views]), side)
                continue
            self._device.copy([memory.view(gathered.dtype)], [gathered], side)
            self._kept.append(memory)
            at = memory.data_ptr()
            for view in views:
                self._moves.append((view.data_ptr(), at, view.nbytes))
                at += view.nbytes

    def _landing(self, views: list[torch.Tensor], gathered: torch.Tensor) -> torch.Tensor | None:
        """Host memory for one copy of small leaves; None: each is copied to its place."""
        if len(views) == 1 or any(view.nbytes > SMALL_BYTES for view in views):
            return None
        try:
            return self._device.pinned(gathered.nbytes)
        except RuntimeError:  # no memory can be pinned
            return None

    def place(self) -> None:
        """Move what lies together to its places. For any thread."""
        with self._lock:
            moves, self._moves = self._moves, []
            for to, source, size in moves:
                ctypes.memmove(to, source, size)
            self._kept = []


def _groups(pairs: Pairs) -> list[Pairs]:
    """Leaves of one type, small enough to be gathered together."""
    groups: list[Pairs] = []
    filling: dict[torch.dtype, tuple[Pairs, int]] = defaultdict(lambda: (([], []), _TOGETHER_BYTES))
    for view, tensor in zip(*pairs, strict=True):
        group, size = filling[view.dtype]
        if size + view.nbytes > _TOGETHER_BYTES:
            group, size = ([], []), 0
            groups.append(group)
        group[0].append(view)
        group[1].append(tensor)
        filling[view.dtype] = (group, size + view.nbytes)
    return groups


def num_bytes(views: Sequence[torch.Tensor]) -> int:
    """The bytes of some leaves."""
    return sum(view.nbytes for view in views)
