"""ChangeGuard detects changes to state that is copied while training continues. FrozenTracker finds frozen state."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.saver.segment import Segment
from ckptstore.format.shards import Placed, Slice

RawMemory = ctypes.Array[ctypes.c_char]

FROZEN_BYTES = 1 << 20
"""Smaller frozen parameters are not tracked, but copied at once."""
_SAMPLE_BYTES = 64
_PAGE_BYTES = 4 << 10
_PAGES = 16
_VERSION: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class ChangeGuard:
    """Compares leaves after the copy with what they were when they were captured.

    It compares version counters, which torch increments with every change in place. Some changes bypass them: through
    `.data`, in fused kernels, in lists of DTensors. For host memory it therefore also compares the first bytes, which
    detects any change of all elements.
    """

    def __init__(self, leaves: Leaves, samples: Sequence[RawMemory]) -> None:
        """samples: the first bytes of each leaf; the transfer keeps that memory alive."""
        self._leaves = leaves
        self._samples = samples
        self._before = self._read()

    def changed(self) -> list[str]:
        """The entries that have changed."""
        pairs = zip(self._leaves.slices, self._before, self._read(), strict=True)
        return [piece.entry for piece, before, now in pairs if before != now]

    def _read(self) -> list[tuple[int, int, bytes]]:
        # The counter of a DTensor and that of its local tensor are incremented by different changes.
        leaves = self._leaves
        counters, same = list(map(_VERSION, leaves.tensors)), leaves.origins is leaves.tensors
        return list(
            zip(
                counters,
                counters if same else map(_VERSION, leaves.origins),
                [memory.raw for memory in self._samples],
                strict=True,
            )
        )


def sample(tensor: torch.Tensor) -> RawMemory:
    """The first bytes of a contiguous tensor in host memory; empty for any other tensor."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return memory_at(0, 0)
    return memory_at(tensor.data_ptr(), min(_SAMPLE_BYTES, tensor.nbytes))


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
