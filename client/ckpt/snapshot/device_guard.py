"""Detects changes of leaves on a device between the call and their copy, which no version counter shows.

Samples: some bytes of every leaf as they are at the call, compared with its copy; in every save. Digests: all bytes of
every leaf; in the first overlapped saves of a layout, because a loop that changes state at the wrong time does so in
each of its steps.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckpt.device import Addresses, Device, digests, rows
from ckpt.lazily import torch
from ckptstore.format.columns import distinct

logger = logging.getLogger(__name__)

_SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Watch:
    """How closely the leaves of a device are watched."""

    digests: bool = False
    """Compare all bytes, from when the device begins to copy."""
    ahead: bool = False
    """Leaves that cannot wait at the gate may be copied on the device first: it is known what training needs."""


class SamplePlaces(NamedTuple):
    """Where some leaves are sampled, by address: 64 bytes of each, or all of a smaller one."""

    size: int
    """Bytes of each sample."""
    numbers: npt.NDArray[np.int64]
    """The numbers of the leaves."""
    sources: Addresses
    """Addresses on the device."""
    copies: Addresses
    """Addresses in the slot."""


def sample_places(copies: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[SamplePlaces]:
    """The middle of each leaf, by size of the sample. copies: addresses in the slot.

    Leaves whose bytes on the device are not their elements in order are not sampled.
    """
    if not tensors:
        return []
    in_order = np.fromiter(map(torch.Tensor.is_contiguous, tensors), bool)
    for differs in (torch.Tensor.is_conj, torch.Tensor.is_neg):
        in_order &= ~np.fromiter(map(differs, tensors), bool)
    sizes = np.array([tensor.nbytes for tensor in tensors])
    begins = np.minimum(sizes // 2, np.maximum(sizes - _SAMPLE_BYTES, 0))
    sources = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64) + begins
    to, sampled = np.array(copies) + begins, np.minimum(sizes, _SAMPLE_BYTES) * in_order
    chosen = [(size, np.flatnonzero(sampled == size)) for size in distinct(sampled[sampled > 0]).tolist()]
    return [SamplePlaces(size, numbers, sources[numbers], to[numbers]) for size, numbers in chosen]


class DeviceGuard:
    """Compares leaves of a device before their copy with the copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._samples: list[tuple[SamplePlaces, torch.Tensor]] = []
        self._digests: torch.Tensor | None = None

    def sample(self, found: Sequence[SamplePlaces]) -> None:
        """Read samples in the order of the current stream. The training thread waits for this, so it is no loop."""

        def read() -> None:
            for places in found:
                self._samples.append((places, self._device.read(places.sources, places.size)))

        _attempt(read, "samples")

    def digest(self, tensors: Sequence[torch.Tensor]) -> None:
        """Read everything on the side stream."""

        def read() -> None:
            memory = self._device.pinned(8 * len(tensors)).view(torch.int64)
            self._device.digest(memory, tensors)
            self._digests = memory

        _attempt(read, "digests")

    def torn(self, views: Sequence[torch.Tensor]) -> list[int]:
        """Numbers of leaves that had changed when they were copied. The device has finished. views: the copies."""
        found = set[int]()
        for places, samples in self._samples:
            differ = (_rows_at(places.copies, places.size) != samples).any(1)
            found.update(places.numbers[differ.numpy()].tolist())
        if self._digests is not None:
            differ = self._digests != digests(views)
            found.update(differ.nonzero().view(-1).tolist())
        return sorted(found)


def _attempt(read: Callable[[], None], kind: str) -> None:
    """Read what only finds mistakes of the training loop: an error, such as missing memory, must not fail a save."""
    try:
        read()
    except Exception as error:
        _warn_once(kind, type(error).__name__)


@cache
def _warn_once(kind: str, _: str) -> None:
    """Called where the error is handled."""
    logger.warning(
        "%s of leaves on a GPU cannot be read. Saves go on, and are compared with the state at the call by less", kind,
        exc_info=True,
    )  # fmt: skip


def _rows_at(addresses: Addresses, size: int) -> torch.Tensor:
    """`size` bytes at each of these addresses of host memory."""
    first = int(addresses.min())
    spanned = (ctypes.c_char * (int(addresses.max()) + size - first)).from_address(first)
    return rows(torch.frombuffer(spanned, dtype=torch.uint8), torch.from_numpy(addresses - first), size)
