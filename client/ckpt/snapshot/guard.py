"""What tells whether a snapshot that was copied while training went on is whole."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.saver.segment import Segment
from ckptstore.format.shards import Placed, Slice

RawMemory = ctypes.Array[ctypes.c_char]

SAMPLE_BYTES = 64
FROZEN_BYTES = 1 << 20
"""Smaller frozen parameters are not watched, but copied at once."""
_PAGE_BYTES = 4 << 10
_PAGES = 16
_VERSION: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]


class ChangeGuard:
    """Looks at leaves when they are captured, and again after the copy.

    It compares version counters, which torch advances with every change in place. Some changes go past them: through
    `.data`, in fused kernels, in lists of DTensors. Of what lies in host memory it therefore also compares the first
    bytes, which sees whatever changes all elements.
    """

    def __init__(self, leaves: Leaves, samples: Sequence[RawMemory]) -> None:
        """witnesses: the first bytes of each leaf; whoever copies keeps that memory alive."""
        self._leaves = leaves
        self._samples = samples
        self._seen = self._look()

    def changed(self) -> list[str]:
        """The entries that are not what they were."""
        pairs = zip(self._leaves.slices, self._seen, self._look(), strict=True)
        return [piece.entry for piece, then, now in pairs if then != now]

    def _look(self) -> list[tuple[int, int, bytes]]:
        # The counter of a DTensor and that of its local tensor are advanced by different changes.
        leaves = self._leaves
        counters, same = list(map(_VERSION, leaves.tensors)), leaves.origins is leaves.tensors
        return list(
            zip(
                counters,
                counters if same else map(_VERSION, leaves.origins),
                [sample.raw for sample in self._samples],
                strict=True,
            )
        )


def sample(tensor: torch.Tensor) -> RawMemory:
    """The first bytes of a tensor in host memory; nothing of another one."""
    if not tensor.is_cpu or not tensor.is_contiguous():
        return memory_at(0, 0)
    return memory_at(tensor.data_ptr(), min(SAMPLE_BYTES, tensor.nbytes))


def memory_at(address: int, num_bytes: int) -> RawMemory:
    """Memory as an object. It does not keep it alive."""
    return (ctypes.c_char * num_bytes).from_address(address)


class FrozenTracker:
    """Which frozen parameters stay as they are while optimizers step.

    A parameter that needs no gradient may be the frozen base of a fine-tuning, or an average that user code moves by
    means that no guard sees. It counts as frozen when samples of it were equal in two saves with a step between them.
    """

    def __init__(self) -> None:
        self.changes = 0
        """Times that the answer for some parameter has changed."""
        self._digests: dict[Slice, int] = {}
        self._steady: set[Slice] = set()

    def __contains__(self, piece: Slice) -> bool:
        return piece in self._steady

    def learn(self, segment: Segment, frozen: Iterable[Placed], stepped: bool) -> None:
        """Look at copies in a slot. stepped: whether an optimizer has stepped since the save before."""
        for place in frozen:
            digest = _sample(segment.view[place.at : place.at + place.slice.bytes])
            known, steady = self._digests.get(place.slice), place.slice in self
            self._digests[place.slice] = digest
            if steady and known != digest:
                self._steady.remove(place.slice)
                self.changes += 1
            elif not steady and known == digest and stepped:
                self._steady.add(place.slice)
                self.changes += 1


def _sample(data: memoryview) -> int:
    stride = max(_PAGE_BYTES, len(data) // _PAGES)
    return xxhash.xxh3_64_intdigest(b"".join(data[at : at + _PAGE_BYTES] for at in range(0, len(data), stride)))
