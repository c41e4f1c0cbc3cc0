"""Guards detect changes to state that is copied while training continues. FrozenTracker finds frozen state."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.host.segment import Segment
from ckpt.lazily import torch
from ckptstore.format.shards import Placed, Slice

RawMemory = ctypes.Array[ctypes.c_char]

FROZEN_BYTES = 1 << 20
"""Smaller frozen parameters are not tracked, but copied at once."""
_PLACES = 16
_PLACE_BYTES = 8
_WHOLE_BYTES = 1 << 10
"""Smaller tensors are compared whole."""
_PAGE_BYTES = 4 << 10
_PAGES = 16


class Sample(NamedTuple):
    """Samples of the memory of one tensor. It does not keep the memory alive."""

    base: int
    """The address of the tensor's storage."""
    read: Callable[[], bytes]
    """The current bytes. The memory must still exist."""


class Guard(ABC):
    """Detects leaves that have changed between their capture and their copy. Made at the capture.

    The thread that copies calls `moved` before it reads memory of a leaf and `copied` after it; `changed` decides once
    everything is copied.
    """

    def __init__(self, leaves: Leaves, samples: Sequence[Sample], storages: Sequence[torch.UntypedStorage]) -> None:
        """samples, storages: of each leaf. The guard keeps the storages alive."""
        self._leaves = leaves
        self._samples = samples
        self._storages = storages
        self._torn: set[int] = set()

    def moved(self, index: int) -> bool:
        """Whether the storage of a leaf has other memory than when it was captured; the old memory may be freed."""
        if self._storages[index].data_ptr() == self._samples[index].base:
            return False
        self._torn.add(index)
        return True

    @abstractmethod
    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        """The next bytes of a leaf have been copied to this address. False if the leaf is known to have changed."""

    @abstractmethod
    def changed(self, indexes: Iterable[int]) -> list[str]:
        """After the copy of these leaves: the entries that have changed."""


class ChangeGuard(Guard):
    """Compares leaves with what they were when they were captured: each after its own copy, and all at the end.

    It compares version counters, which torch increments with every change in place. Some changes bypass them: through
    `.data`, in fused kernels, in lists of DTensors. For host memory it therefore also compares samples of the memory,
    which detect any change of all elements, and the address of the storage.
    """

    def __init__(self, leaves: Leaves, samples: Sequence[Sample], storages: Sequence[torch.UntypedStorage]) -> None:
        super().__init__(leaves, samples, storages)
        # The counter of a DTensor and that of its local tensor are incremented by different changes.
        self._version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
        self._counters = list(map(self._version, leaves.tensors))
        same = leaves.origins is leaves.tensors
        self._origin_counters = self._counters if same else list(map(self._version, leaves.origins))
        self._bytes = [sample.read() for sample in samples]

    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        """Check the leaf."""
        return self.check(index)

    def check(self, index: int) -> bool:
        """Whether a leaf is unchanged, now and at every earlier check. Does not read memory that was replaced."""
        leaves, sample = self._leaves, self._samples[index]
        if (
            self.moved(index)
            or self._version(leaves.tensors[index]) != self._counters[index]
            or self._version(leaves.origins[index]) != self._origin_counters[index]
            or sample.read() != self._bytes[index]
        ):
            self._torn.add(index)
        return index not in self._torn

    def changed(self, indexes: Iterable[int]) -> list[str]:
        """Check these leaves; the entries that have changed, now or at an earlier check."""
        return [self._leaves.slices[index].entry for index in indexes if not self.check(index)]


def sample(tensor: torch.Tensor) -> Sample:
    """Samples at 16 places of a tensor in host memory, its first and last bytes included; all of a small one.

    Empty for tensors that are not in host memory.
    """
    base, num_bytes = tensor.untyped_storage().data_ptr(), tensor.nbytes
    if not tensor.is_cpu or not num_bytes:
        return unread(tensor)
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    span_bytes = tensor.element_size() * (1 + sum((size - 1) * stride for size, stride in strides))
    memory = memoryview(memory_at(tensor.data_ptr(), span_bytes)).cast("B")
    if span_bytes != num_bytes:  # other tensors have elements in between
        return Sample(base, partial(_elements, np.frombuffer(memory, np.uint8), _offsets(tensor)))
    if num_bytes <= _WHOLE_BYTES:
        return Sample(base, np.frombuffer(memory, np.uint8).tobytes)
    step = (num_bytes - _PLACE_BYTES) // (_PLACES - 1)
    width = num_bytes - (_PLACES - 1) * step  # the last place ends with the tensor
    return Sample(base, np.ndarray(_PLACES, f"V{width}", memory, strides=(step,)).tobytes)


def unread(tensor: torch.Tensor) -> Sample:
    """No samples: the CPU does not read memory of a device, and an empty tensor has none."""
    return Sample(tensor.untyped_storage().data_ptr(), bytes)


def _elements(memory: np.ndarray[Any, Any], offsets: np.ndarray[Any, Any]) -> bytes:
    read: bytes = memory[offsets].tobytes()
    return read


def _offsets(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The offsets of the bytes of elements at 16 places of a tensor, first and last included."""
    places = np.unravel_index(np.linspace(0, tensor.numel() - 1, _PLACES, dtype=np.int64), tensor.shape)
    steps = zip(places, tensor.stride(), strict=True)
    first = sum((place * step for place, step in steps), np.zeros(_PLACES, np.int64)) * tensor.element_size()
    return (first[:, None] + np.arange(tensor.element_size())).reshape(-1)


def memory_at(address: int, num_bytes: int) -> RawMemory:
    """Memory as an object. It does not keep the memory alive."""
    return (ctypes.c_char * num_bytes).from_address(address)


class FrozenTracker:
    """The frozen parameters that stay unchanged while optimizers step.

    A parameter that needs no gradient may be the frozen base of a fine-tuning, or an average that user code updates in
    ways that no guard detects. It counts as frozen once samples of it were equal in two saves with a step in between.
    """

    def __init__(self) -> None:
        self.changes = 0
        """How often the answer for a parameter has changed."""
        self._digests: dict[Slice, int] = {}
        self._frozen: set[Slice] = set()

    def __contains__(self, piece: Slice) -> bool:
        return piece in self._frozen

    def observe(self, segment: Segment, placed: Iterable[Placed], stepped: bool) -> None:
        """Compare copies in a slot with those of the last save. stepped: whether an optimizer has stepped since."""
        for place in placed:
            digest = _digest(segment.view[place.at : place.at + place.slice.bytes])
            known, frozen = self._digests.get(place.slice), place.slice in self
            self._digests[place.slice] = digest
            if frozen and known != digest:
                self._frozen.remove(place.slice)
                self.changes += 1
            elif not frozen and known == digest and stepped:
                self._frozen.add(place.slice)
                self.changes += 1


def _digest(data: memoryview) -> int:
    """The digest of some pages of the data."""
    stride = max(_PAGE_BYTES, len(data) // _PAGES)
    return xxhash.xxh3_64_intdigest(b"".join(data[at : at + _PAGE_BYTES] for at in range(0, len(data), stride)))
