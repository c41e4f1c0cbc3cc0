"""Guards detect changes to state that is copied while training continues. FrozenTracker finds frozen state.

ChangeGuard compares counters and samples, DigestGuard all bytes in host memory. DeviceGuard does so for leaves on a
device, by samples in every save, and by digests in the first overlapped saves of a layout: a loop that changes state at
the wrong time does so in each of its steps. CopyProgress shows optimizers which parts are copied.
"""

from __future__ import annotations

import ctypes
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ckpt.capture.leaves import Leaves
from ckpt.device import DIGEST_LAUNCHES, Addresses, Device, digests, rows
from ckpt.host.segment import Segment
from ckpt.lazily import torch
from ckptstore.codecs import fused
from ckptstore.errors import SnapshotTorn
from ckptstore.format.columns import distinct
from ckptstore.format.shards import Placed, Slice
from ckptstore.threads import Latch, in_parallel

logger = logging.getLogger(__name__)

Part = frozenset[int]
"""The numbers of the optimizers that change some leaves of a save, and wait for their copies."""
EVERYONE: Part = frozenset()
"""The part of the leaves that every optimizer waits for."""


class CopyProgress:
    """Which parts of one snapshot are copied. For any thread."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self._copied = {part: Latch() for part in parts}
        self._wanted: set[Part] = set()
        self._of: dict[int | None, list[Part]] = defaultdict(list)
        """By the number of an optimizer; there may be thousands. None: the parts that every one waits for."""
        for part in self._copied:
            for number in part or (None,):
                self._of[number].append(part)

    def parts_of(self, number: int | None) -> list[Part]:
        """The parts that an optimizer with this number waits for; one without a number waits for all."""
        if number is None:
            return list(self._copied)
        return [*self._of.get(None, ()), *self._of.get(number, ())]

    def wait_for(self, parts: Iterable[Part]) -> None:
        """Return when these parts are copied, or the copy has failed. They are copied before others."""
        self._wanted.update(parts)
        for part in parts:
            self._copied[part].wait()

    def next(self, left: Mapping[Part, Any]) -> Part:
        """The part among these to copy next."""
        return next((part for part in tuple(self._wanted) if part in left), next(iter(left)))

    def copied(self, part: Part) -> None:
        """A part is copied."""
        self._copied[part].set()
        self._wanted.discard(part)

    def end(self) -> None:
        """No optimizer waits for the copy any more."""
        for event in self._copied.values():
            event.set()


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


@dataclass
class _AnyGuard:
    """Detects leaves that have changed between their capture and their copy. Made at the capture.

    The thread that copies calls `moved` before it reads memory of a leaf and `copied` after it; `changed` decides once
    everything is copied.
    """

    _leaves: Leaves
    _samples: Sequence[Sample]
    _storages: Sequence[torch.UntypedStorage]
    """The storage of each leaf, whose memory this keeps alive."""

    def __post_init__(self) -> None:
        self._torn: set[int] = set()

    def moved(self, index: int) -> bool:
        """Whether the storage of a leaf has other memory than when it was captured; the old memory may be freed."""
        if self._storages[index].data_ptr() == self._samples[index].base:
            return False
        self._torn.add(index)
        return True


class ChangeGuard(_AnyGuard):
    """Compares leaves with what they were when they were captured: each after its own copy, and all at the end.

    It compares version counters, which torch increments with every change in place. Some changes bypass them: through
    `.data`, in fused kernels, in lists of DTensors. For host memory it therefore also compares samples of the memory,
    which detect any change of all elements, and the address of the storage.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        leaves = self._leaves
        # The counter of a DTensor and that of its local tensor are incremented by different changes.
        self._version: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]
        self._counters = list(map(self._version, leaves.tensors))
        alike = all(map(is_, leaves.tensors, leaves.origins))
        self._origin_counters = self._counters if alike else list(map(self._version, leaves.origins))
        self._bytes = [sample.read() for sample in self._samples]

    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        """The next bytes of a leaf have been copied to this address: check it."""
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
        elements, offsets = np.frombuffer(memory, np.uint8), _offsets(tensor)
        return Sample(base, lambda: elements[offsets].tobytes())
    if num_bytes <= _WHOLE_BYTES:
        return Sample(base, np.frombuffer(memory, np.uint8).tobytes)
    step = (num_bytes - _PLACE_BYTES) // (_PLACES - 1)
    width = num_bytes - (_PLACES - 1) * step  # the last place ends with the tensor
    return Sample(base, np.ndarray(_PLACES, f"V{width}", memory, strides=(step,)).tobytes)


def unread(tensor: torch.Tensor) -> Sample:
    """No samples: the CPU does not read memory of a device, and an empty tensor has none."""
    return Sample(tensor.untyped_storage().data_ptr(), bytes)


def _offsets(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The offsets of the bytes of elements at 16 places of a tensor, first and last included."""
    places = np.unravel_index(np.linspace(0, tensor.numel() - 1, _PLACES, dtype=np.int64), tensor.shape)
    steps = zip(places, tensor.stride(), strict=True)
    first = sum((place * step for place, step in steps), np.zeros(_PLACES, np.int64)) * tensor.element_size()
    return (first[:, None] + np.arange(tensor.element_size())).reshape(-1)


def memory_at(address: int, num_bytes: int) -> RawMemory:
    """Memory as an object. It does not keep the memory alive."""
    return (ctypes.c_char * num_bytes).from_address(address)


Move = tuple[int, int, int]
"""Address to copy to, address to copy from, and number of bytes."""
Moves = npt.NDArray[np.int64]
"""A row for each."""


def as_moves(moves: Sequence[Move]) -> Moves:
    """As an array."""
    return np.array(moves, np.int64).reshape(-1, 3)


NOTHING = as_moves([])


def move_all(moves: Moves) -> None:
    """Copy memory."""
    # torch copies with all of its threads and waits for the slowest: several times slower than one
    # thread as soon as a core is busy, for example with the saver. This releases the GIL.
    if not fused.move(moves):
        for to, source, size in moves.tolist():
            ctypes.memmove(to, source, size)


def differing(moves: Moves, whole: bool) -> list[int]:
    """The numbers of copies whose memory differs from them; see `differ`."""
    found = fused.differ(moves, 0 if whole else _COMPARED_PLACES, _COMPARED_BYTES)
    if found is not None:
        return found
    return [i for i, (to, source, size) in enumerate(moves.tolist()) if differ(to, source, size, whole)]


WHOLE_BYTES = 32 << 20
"""All bytes of a snapshot up to this size are compared with the state: that takes less than 5 ms."""
_COMPARED_PLACES, _COMPARED_BYTES = 4, 1 << 10
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def differ(copy: int, memory: int, num_bytes: int, whole: bool) -> bool:
    """Whether memory differs from its copy, by address. whole: compare all bytes, not some at four places."""
    if whole or num_bytes <= _COMPARED_PLACES * _COMPARED_BYTES:
        return bool(_compare(copy, memory, num_bytes))
    last = num_bytes - _COMPARED_BYTES
    places = range(0, last + 1, last // (_COMPARED_PLACES - 1))
    return any(_compare(copy + at, memory + at, _COMPARED_BYTES) for at in places)


def differ_by_element(copy: torch.Tensor, tensor: torch.Tensor, whole: bool) -> bool:
    """The same for a tensor whose bytes are not its elements in order: by default its first and last row."""
    if not whole and copy.dim() and len(copy) > 2:
        return any(differ_by_element(copy[row], tensor[row], whole=True) for row in (0, -1))
    again = torch.empty(copy.shape, dtype=copy.dtype, device="cpu")
    with torch.no_grad():
        again.copy_(tensor)
    return differ(copy.data_ptr(), again.data_ptr(), copy.nbytes, whole=True)


_NAMED = 3
LET_NOTHING_WRITE = "Let nothing write to the state during save_async"


def torn_error(entries: Sequence[str], when: str, hint: str) -> SnapshotTorn:
    """Entries have changed. when: in words."""
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return SnapshotTorn(f"{', '.join(entries[:_NAMED])}{more} changed {when}", hint)


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
            same, frozen = self._digests.get(place.slice) == digest, place.slice in self
            self._digests[place.slice] = digest
            if frozen != (same and (stepped or frozen)):
                self._frozen ^= {place.slice}
                self.changes += 1


def _digest(data: memoryview) -> int:
    """The digest of some pages of the data."""
    stride = max(_PAGE_BYTES, len(data) // _PAGES)
    return xxhash.xxh3_64_intdigest(b"".join(data[at : at + _PAGE_BYTES] for at in range(0, len(data), stride)))


class DigestGuard(_AnyGuard):
    """Compares the digest of each leaf's memory at the call with that of the bytes that were copied.

    Equal digests (xxh3-128) show that the copy is the state of the call, whatever happened to the memory meanwhile. For
    contiguous leaves in host memory only. The bytes of a leaf are copied in order, one leaf after the other.
    """

    def __post_init__(self) -> None:
        """Reads all leaves, with as many threads as torch uses."""
        super().__post_init__()
        self._digests = _digests(self._leaves.tensors)
        self._sizes = [tensor.nbytes for tensor in self._leaves.tensors]
        self._same = {index for index, size in enumerate(self._sizes) if not size}
        """The leaves whose copies are complete and equal."""
        self._copying: int | None = None
        self._copied_bytes = 0
        self._hash = xxhash.xxh3_128()

    def copied(self, index: int, address: int, num_bytes: int) -> bool:
        """Hash the copied bytes; with the last ones of the leaf, compare digests. False if they are known to differ."""
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


Guard = ChangeGuard | DigestGuard


def _digests(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """The digest of each tensor's memory."""
    digests = [b""] * len(tensors)
    left = iter(range(len(tensors)))  # shared by all threads, each of which takes the next tensor

    def work() -> None:
        for index in left:
            tensor = tensors[index]
            digests[index] = xxhash.xxh3_128_digest(memory_at(tensor.data_ptr(), tensor.nbytes))

    num_threads = min(torch.get_num_threads(), len(tensors), sum(tensor.nbytes for tensor in tensors) // WHOLE_BYTES)
    if num_threads <= 1:
        work()
    else:
        in_parallel(lambda _: work(), range(num_threads), num_threads)
    return digests


_SAMPLE_BYTES = 64


class Watch(NamedTuple):
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
    in_order = np.fromiter(map(is_in_order, tensors), bool)
    sizes = np.array([tensor.nbytes for tensor in tensors])
    begins = np.minimum(sizes // 2, np.maximum(sizes - _SAMPLE_BYTES, 0))
    sources = np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64) + begins
    to, sampled = np.array(copies) + begins, np.minimum(sizes, _SAMPLE_BYTES) * in_order
    chosen = [(size, np.flatnonzero(sampled == size)) for size in distinct(sampled[sampled > 0]).tolist()]
    return [SamplePlaces(size, numbers, sources[numbers], to[numbers]) for size, numbers in chosen]


def is_in_order(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes are its elements, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class DeviceGuard:
    """Compares leaves of a device before their copy with the copies."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._samples: list[tuple[SamplePlaces, torch.Tensor]] = []
        self._digests: torch.Tensor | None = None

    def sample(self, found: Sequence[SamplePlaces]) -> None:
        """Read samples in the order of the current stream. The training thread waits for this, so it is no loop."""
        with _OnlyWarns("samples"):
            for places in found:
                self._samples.append((places, self._device.read(places.sources, places.size)))

    def digest(self, tensors: Sequence[torch.Tensor], slices: Callable[[int, int], Iterable[slice]]) -> None:
        """Read everything on the side stream. slices: parts of as many leaves, of so many launches each, when they can
        be queued."""
        with _OnlyWarns("digests"):
            memory = self._device.pinned(8 * len(tensors)).view(torch.int64)
            for part in slices(len(tensors), DIGEST_LAUNCHES):
                self._device.digest(memory[part], tensors[part])
            self._digests = memory

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


class _OnlyWarns:
    """Errors of torch and Triton, as of missing memory, fail no save in a check that only finds mistakes of the loop.

    No generator: an exception of a signal handler before its `yield` would become a RuntimeError.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        of_device = isinstance(error, (RuntimeError, ValueError, LookupError)) or "triton" in type(error).__module__
        if not of_device:  # none, one of a signal handler, or SaveFailed: the device is stuck
            return False
        _warn_once(self._kind, type(error).__name__)
        return True


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
    spanned = memory_at(first, int(addresses.max()) + size - first)
    return rows(torch.frombuffer(spanned, dtype=torch.uint8), torch.from_numpy(addresses - first), size)
