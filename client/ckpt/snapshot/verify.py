"""DigestGuard detects every change of state between the call and its copy, at the price of reading it at the call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.snapshot.guard import Guard, Sample, memory_at


class DigestGuard(Guard):
    """Compares the digest of each leaf's memory at the call with that of the bytes that were copied.

    Equal digests (xxh3-128) show that the copy is the state of the call, whatever happened to the memory meanwhile. For
    contiguous leaves in host memory only. The bytes of a leaf are copied in order, one leaf after the other.
    """

    def __init__(self, leaves: Leaves, samples: Sequence[Sample], storages: Sequence[torch.UntypedStorage]) -> None:
        """Reads all leaves, with as many threads as torch uses."""
        super().__init__(leaves, samples, storages)
        self._digests = _digests(leaves.tensors)
        self._sizes = [tensor.nbytes for tensor in leaves.tensors]
        self._same = {index for index, size in enumerate(self._sizes) if not size}
        """The leaves whose copies are complete and equal."""
        self._copying: int | None = None
        self._copied_bytes = 0
        self._hash = xxhash.xxh3_128()

    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        """Hash the copied bytes; with the last ones of the leaf, compare digests."""
        if index != self._copying:
            self._copying, self._copied_bytes, self._hash = index, 0, xxhash.xxh3_128()
        self._hash.update(memory_at(address, num_bytes))
        self._copied_bytes += num_bytes
        if self._copied_bytes == self._sizes[index]:
            (self._same if self._hash.digest() == self._digests[index] else self._torn).add(index)
        return index not in self._torn

    def changed(self, indexes: Iterable[int]) -> list[str]:
        """The entries whose copies differ from the call; if there are none, those that were not copied."""
        among = set(indexes)
        torn = self._torn & among if self._torn else among - self._same
        return [self._leaves.slices[index].entry for index in sorted(torn)]


def _digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The digest of each tensor's memory."""
    digests = [b""] * len(tensors)
    left = iter(range(len(tensors)))  # shared by all threads, each of which takes the next tensor

    def work() -> None:
        for index in left:
            tensor = tensors[index]
            digests[index] = xxhash.xxh3_128_digest(memory_at(tensor.data_ptr(), tensor.nbytes))

    num_threads = min(torch.get_num_threads(), len(tensors))
    if num_threads <= 1:
        work()
        return digests
    with ThreadPoolExecutor(num_threads, thread_name_prefix="ckpt-digest") as threads:
        for working in [threads.submit(work) for _ in range(num_threads)]:
            working.result()
    return digests
