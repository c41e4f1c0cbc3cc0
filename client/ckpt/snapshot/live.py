"""LiveState: the state of a save that is not copied, because the host has no memory for a snapshot."""

from __future__ import annotations

from bisect import bisect_right

import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.device import DEVICES, has_device, poll
from ckpt.lazily import torch
from ckpt.snapshot.guard import LET_NOTHING_WRITE, memory_at, torn_error
from ckpt.snapshot.stage import SnapshotLayout, is_plain
from ckptstore.errors import SaveFailed


class LiveState:
    """The raw stream of a shard, read from the tensors of the training loop, which must not change until `close`.

    The training thread waits meanwhile; `check` detects changes by others. Each read returns memory of a tensor in
    place, or a copy of the range that was asked for. For any thread.
    """

    def __init__(self, leaves: Leaves, layout: SnapshotLayout) -> None:
        """Waits until GPUs have done the work that was queued before."""
        placed = zip(layout.placed, layout.order, strict=True)
        found = [(place, tensor) for place, i in placed if (tensor := leaves.tensors[i].detach()).nbytes]
        self._begins = [place.at for place, _ in found]
        self._tensors = [tensor for _, tensor in found]
        self._entries = [place.slice.entry for place, _ in found]
        self._closed = False
        for device in {tensor.device for tensor in self._tensors if has_device(tensor)}:
            poll(DEVICES[device.type](device).mark(side=False).done)
        self._seen = list(map(_digest, self._tensors))

    def check(self) -> None:
        """Call it when all is read. Raises SnapshotTorn if any byte of host memory has changed since the call."""
        pairs = zip(self._entries, self._seen, map(_digest, self._tensors), strict=True)
        if changed := [entry for entry, before, now in pairs if before != now]:
            raise torn_error(changed, "while it was uploaded, in another thread or process", LET_NOTHING_WRITE)

    def __getitem__(self, part: slice) -> memoryview:
        """The bytes of a range. Raises SaveFailed after `close`."""
        if self._closed:
            raise SaveFailed("the save was interrupted before the state was read")
        pieces, at = [], part.start
        while at < part.stop:
            number = bisect_right(self._begins, at) - 1
            tensor, begin = self._tensors[number], self._begins[number]
            end = min(part.stop, begin + tensor.nbytes)
            pieces.append(_read(tensor, at - begin, end - begin))
            at = end
        return pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))

    def close(self) -> None:
        """Refuse further reads."""
        self._closed = True


_PIECE_BYTES = 16 << 20


def _digest(tensor: torch.Tensor) -> bytes:
    """The digest of host memory, read in pieces: there is no memory for a copy of the whole tensor."""
    found = xxhash.xxh3_128()
    for at in range(0, 0 if has_device(tensor) else tensor.nbytes, _PIECE_BYTES):
        found.update(_read(tensor, at, min(at + _PIECE_BYTES, tensor.nbytes)))
    return found.digest()


def _read(tensor: torch.Tensor, begin: int, end: int) -> memoryview:
    """Some bytes of a tensor's elements, in order."""
    if is_plain(tensor):
        return memoryview(memory_at(tensor.data_ptr() + begin, end - begin)).cast("B").toreadonly()
    size = tensor.element_size()
    elements = _elements(tensor, begin // size, end // size)
    copy = torch.empty(elements.shape, dtype=elements.dtype, device="cpu").copy_(elements)
    return copy.view(torch.uint8).numpy().data.toreadonly()


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Some elements of a tensor in one dimension. Copies at most the rows that they lie in."""
    while tensor.dim() > 1 and not tensor.is_contiguous():
        row = tensor[0].numel()
        first, last = begin // row, -(-end // row)
        tensor, begin, end = tensor[first:last], begin - first * row, end - first * row
        if last - first > 1:
            break
        tensor = tensor[0]
    return tensor.reshape(-1)[begin:end]
