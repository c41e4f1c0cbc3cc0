"""Detects changes of leaves on a device between the call and their copy, which no version counter shows.

Samples: some bytes of leaves, compared with their copies; in every save. Digests: all bytes of every leaf; in the first
overlapped saves of a layout, because a loop that changes state at the wrong time does so in each of its steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from operator import add
from typing import NamedTuple

from ckpt.device import Device, digests
from ckpt.lazily import torch

_SAMPLE_BYTES = 64
_SAMPLED_LEAVES = 64


@dataclass(frozen=True, slots=True)
class Watch:
    """How closely the leaves of a device are watched."""

    from_call: bool = False
    """Sample all of them in the order of the current stream. Otherwise some, when the device begins to copy."""
    digests: bool = False
    """Compare all bytes, from when the device begins to copy."""
    ahead: bool = False
    """Leaves that cannot wait at the gate may be copied on the device first: it is known what training needs."""


class _Samples(NamedTuple):
    """Samples of leaves of one type, one after the other."""

    memory: torch.Tensor
    numbers: Sequence[int]
    counts: Sequence[int]
    """Elements of each sample."""
    begins: Sequence[int]
    """The first element of each."""


class DeviceGuard:
    """Compares leaves of a device before their copy with the copies."""

    def __init__(self, device: Device, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        self._device = device
        self._views = views
        self._tensors = tensors
        self._samples: list[_Samples] = []
        self._digests: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    def sample(self, side: bool) -> None:
        """Read samples: of all leaves in the order of the current stream, or of some on the side stream.

        Column by column, with one copy for each type: the training thread waits for the first way.
        """
        step = max(1, len(self._tensors) // _SAMPLED_LEAVES) if side else 1
        tensors, numbers = self._tensors[::step], range(0, len(self._tensors), step)
        kinds, sizes = [tensor.dtype for tensor in tensors], list(map(torch.Tensor.numel, tensors))
        plain = list(map(torch.Tensor.is_contiguous, tensors))
        if any(kind.is_complex for kind in set(kinds)):
            plain = [each and not tensor.is_conj() for each, tensor in zip(plain, tensors, strict=True)]
        with suppress(RuntimeError):  # no memory: the save goes on without samples
            for kind in dict.fromkeys(kinds):
                most = max(1, _SAMPLE_BYTES // kind.itemsize)
                chosen = [i for i, size in enumerate(sizes) if size and plain[i] and kinds[i] is kind]
                counts = [min(sizes[i], most) for i in chosen]
                begins = [min(sizes[i] // 2, sizes[i] - count) for i, count in zip(chosen, counts, strict=True)]
                found = _Samples(torch.empty(0), [numbers[i] for i in chosen], counts, begins)
                self._samples += self._read(found, [tensors[i] for i in chosen], side)

    def _read(self, places: _Samples, tensors: Sequence[torch.Tensor], side: bool) -> list[_Samples]:
        if not tensors:
            return []
        offsets = map(add, map(torch.Tensor.storage_offset, tensors), places.begins)
        parts = map(torch.as_strided, tensors, zip(places.counts), repeat((1,)), offsets)
        gathered = self._device.gather(list(parts), side)
        memory = self._device.pinned(gathered.nbytes).view(gathered.dtype)
        self._device.copy([memory], [gathered], side)
        self._kept.append(gathered)
        return [places._replace(memory=memory)]

    @property
    def sampled(self) -> bool:
        """Whether samples are read."""
        return bool(self._samples)

    def digest(self) -> None:
        """Read everything on the side stream."""
        with suppress(RuntimeError):  # no memory: the samples remain
            memory = self._device.pinned(8 * len(self._tensors)).view(torch.int64)
            self._device.digest(memory, self._tensors)
            self._digests = memory

    def torn(self) -> list[int]:
        """Numbers of leaves that had changed when they were copied. The device has finished."""
        found = set[int]()
        for memory, numbers, counts, begins in self._samples:
            at, item = memory.data_ptr(), memory.element_size()
            for number, count, begin in zip(numbers, counts, begins, strict=True):
                copy = self._views[number].data_ptr() + begin * item
                if ctypes.string_at(copy, count * item) != ctypes.string_at(at, count * item):
                    found.add(number)
                at += count * item
        if self._digests is not None:
            differ = self._digests != digests(self._views)
            found.update(differ.nonzero().view(-1).tolist())
        return sorted(found)
