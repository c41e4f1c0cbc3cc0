"""Devices: the streams, events and pins of a GPU, as far as saves and restores use them.

The rules of order are in snapshot/device_copies.py, snapshot/overlap.py and restoring/gpu_copy.py. They use nothing of
CUDA but `Device` and `Mark`, so tests run them on a device that is simulated in host memory. CUDA is not initialized
before a device is used.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt.lazily import torch
from ckptstore.errors import SaveFailed
from ckptstore.threads import Latch

_POLL_S = (50e-6, 2e-3)
_MARGIN = 0.1
"""The part of a device's memory that is left free."""
_COLUMNS = 1021
_DIGEST_BYTES = 2048 * 8 * _COLUMNS
"""Bytes that are not aligned as words are copied, and digested, in pieces of this size."""
_DIGESTED = 64
"""Leaves whose digests are computed together."""
DIGEST_LAUNCHES = 4
"""The kernels that this takes for each leaf."""
_WEIGHT = 0x1E3779B97F4A7C15
_SPANNED_BYTES, _ROWS = 1 << 32, 32
"""Torch has other kernels for smaller matrices. One kernel is loaded once: see Stager.warm_up."""


Addresses = npt.NDArray[np.int64]


class Mark:
    """A point in the work of a stream: an event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def done(self) -> bool:
        """Whether the device has reached it. Raises the errors of the device."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]


class Device:
    """One GPU. For any thread; the current stream is that of the calling thread, the side stream the same for all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Hashable:
        """The current stream."""
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def mark(self, side: bool) -> Mark:
        """A point after everything queued so far on the side stream, or on the current stream."""
        return Mark(self._stream(side))

    def wait(self, mark: Mark, side: bool) -> None:
        """Order later work of the side stream, or of the current stream, after a mark. The CPU does not wait."""
        self._stream(side).wait_event(mark.event)

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        """Queue copies from tensors of the device into pinned memory, on the side stream or on the current stream.

        All in one call, which releases the GIL once.
        """
        if not tensors:
            return
        with self._on(side):
            # By default torch conjugates and negates in host memory, where the bytes have not arrived yet.
            resolved = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            torch._foreach_copy_(list(views), resolved, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        """Queue the operations of `work` on the side stream."""
        with self._on(side=True):
            work()

    def gather(self, tensors: Sequence[torch.Tensor], side: bool) -> torch.Tensor:
        """New memory of the device, for the elements of tensors of one type, one after the other. Raises RuntimeError.

        One kernel fills it for about a hundred tensors. Keep it until the work on it is done: it is reused in the order
        of the stream that it was made on.
        """
        with self._on(side):
            if any(map(torch.Tensor.is_conj, tensors)) or any(map(torch.Tensor.is_neg, tensors)):
                tensors = [tensor.resolve_conj().resolve_neg() for tensor in tensors]
            return torch.cat(list(map(torch.ravel, tensors)))

    def read(self, addresses: Addresses, size: int) -> torch.Tensor:
        """Queue a read of `size` bytes at each of these addresses of the device, in the order of the current stream.

        Returns pinned memory, with a row for each. Keep the memory at the addresses until the read is done: one kernel
        reads a tensor that spans them all. Raises RuntimeError.
        """
        with torch.cuda.device(self._device):
            first, count = int(addresses.min()), len(addresses)
            num_bytes = max(int(addresses.max()) + size - first, _SPANNED_BYTES)
            offsets = self.pinned(8 * max(count, _ROWS)).view(torch.int64).zero_()
            np.subtract(addresses, first, out=offsets.numpy()[:count])
            spanning = torch.as_tensor(_CudaMemory(first, num_bytes), device=self._device)
            found = rows(spanning, offsets.to(self._device, non_blocking=True), size)
            memory = self.pinned(found.nbytes).view(found.shape)
            return memory.copy_(found, non_blocking=True)[:count]

    def digest(self, into: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Queue `digests` of tensors on the side stream, into pinned memory. Raises RuntimeError."""
        self.run(lambda: into.copy_(digests(tensors), non_blocking=True))

    def free_bytes(self) -> int:
        """Memory that may be used beside training, less a margin for a peak that is yet to come. Raises RuntimeError.

        Not what torch's allocator keeps: training needs it again, or a CUDA graph has it alone.
        """
        free, total = torch.cuda.mem_get_info(self._device)
        return int(free - _MARGIN * total)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """New pinned memory. Raises RuntimeError."""
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pin(self, address: int, num_bytes: int) -> int:
        """Page-lock memory, so that copies into it are asynchronous. Returns an error code; 0: success."""
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1))  # type: ignore[no-untyped-call]

    def unpin(self, address: int) -> int:
        """Undo `pin`. Returns an error code; 0: success."""
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def crosses(self, address: int) -> bool:
        """Whether a copy may cross the border at this address, between two pieces of memory that were pinned one by
        one. Writes the bytes beside it."""
        beside = torch.frombuffer((ctypes.c_char * 2).from_address(address - 1), dtype=torch.uint8)
        try:
            self.copy([beside], [torch.zeros(2, dtype=torch.uint8, device=self._device)], side=True)
        except RuntimeError:
            return False
        return poll(self.mark(side=True).done)

    def numa_node(self) -> int | None:
        """The NUMA node that the device is connected to, as Linux reports it. None if that is not known."""
        found: Any = torch.cuda.get_device_properties(self._device)
        try:  # torch before 2.8 does not say
            address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
            node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            return None
        return node if node >= 0 else None

    def _stream(self, side: bool) -> torch.cuda.Stream:
        if not side:
            return torch.cuda.current_stream(self._device)
        stream = _side_streams.get(self._device)
        if stream is None:
            new = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            stream = _side_streams.setdefault(self._device, new)
        return stream

    @contextmanager
    def _on(self, side: bool) -> Iterator[None]:
        """Like `torch.cuda.stream`, for threads that have not set a device.

        Their current device is 0, and torch.cuda.stream alone would switch back to it at the end. That would create a
        context of hundreds of megabytes on GPU 0 for every process that uses another GPU.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream(side)):
            yield


_side_streams: dict[torch.device, torch.cuda.Stream] = {}
"""By device. Streams are never freed, so all copies share one."""


class _CudaMemory:
    """A range of addresses of a CUDA device, for torch. Memory at some of them need not exist."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (num_bytes,), "typestr": "|u1", "version": 3,
        }  # fmt: skip


DEVICES: dict[str, Callable[[torch.device], Device]] = {"cuda": Device}
"""By device type. Tensors of other types, such as XPU and MPS, are copied at the call."""


def has_device(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on a device whose copies are asynchronous."""
    return tensor.device.type in DEVICES


def is_capturing() -> bool:
    """Whether the work of this thread is captured into a graph instead of being executed."""
    # Both calls fail in a torch without CUDA; neither initializes it.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def rows(memory: torch.Tensor, offsets: torch.Tensor, size: int) -> torch.Tensor:
    """`size` bytes at each of these offsets of memory, given as bytes: a matrix with a row for each."""
    return memory.unfold(0, size, 1).index_select(0, offsets)


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """64 bits for the bytes of each tensor, equal on every device: integers, so the order of additions is irrelevant.

    The bytes, as words of 64 bits, are the rows of a matrix of 1021 columns. The digest is the sum of the columns, each
    times an odd number, modulo 2**64. It differs if one word does, and if words change places within a row.
    """
    weights = torch.arange(_COLUMNS, dtype=torch.int64, device=tensors[0].device) * _WEIGHT | 1
    found = []
    for at in range(0, len(tensors), _DIGESTED):
        columns = torch.nn.utils.rnn.pad_sequence(list(map(_columns, tensors[at : at + _DIGESTED])), batch_first=True)
        found.append((columns * weights[: columns.shape[1]]).sum(1))
    return torch.cat(found)


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    """The words of a tensor; of one that has several rows, the sums of their columns."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() <= 8 * _COLUMNS:
        return _words(flat)
    sums = []
    for piece in torch.split(flat, flat.numel() if _are_words(flat) else _DIGEST_BYTES):
        words = _words(piece)
        whole = words.numel() // _COLUMNS * _COLUMNS
        sums.append(words[:whole].view(-1, _COLUMNS).sum(0))
        sums[-1][: words.numel() - whole].add_(words[whole:])
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def _are_words(data: torch.Tensor) -> bool:
    return not (data.data_ptr() % 8 or data.storage_offset() % 8 or data.numel() % 8)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Bytes as words, with zeros at the end."""
    if not _are_words(data):
        padded = data.new_zeros(-(-data.numel() // 8) * 8)
        padded[: data.numel()] = data
        data = padded
    return data.view(torch.int64)


class Patience:
    """How long the thread that copies may wait for a device. For any thread."""

    def __init__(self) -> None:
        self.wanted = Latch()
        """Set once an optimizer is about to step: from then on, queue work without waiting."""
        self.give_up_at = math.inf
        """When to stop waiting, by time.monotonic()."""

    def expired(self) -> bool:
        """Whether to stop waiting."""
        return time.monotonic() > self.give_up_at

    def wait_for(self, mark: Mark) -> None:
        """Return when a device has reached a point or an optimizer is about to step. Raises SaveFailed."""
        poll(mark.done, lambda: self.wanted.is_set() or self.expired(), self.wanted.wait)
        self.check()

    def wait_until(self, done: Callable[[], bool]) -> None:
        """Return when a device is done. Raises SaveFailed."""
        if not poll(done, self.expired):
            self.check()

    def check(self) -> None:
        """Raises SaveFailed if time has expired. Nothing more may be queued then: launches behind a device that is
        stuck block, and nothing can end them."""
        if self.expired():
            raise stuck()


def stuck() -> SaveFailed:
    """The error of a save whose time has expired."""
    return SaveFailed(
        "a device did not finish the copy of the snapshot in time",
        "It is stuck behind earlier work, such as a collective whose other rank is lost. Look for the first rank that "
        "failed",
    )


def poll(
    done: Callable[[], bool], expired: Callable[[], bool] | None = None, sleep: Callable[[float], object] = time.sleep
) -> bool:
    """Wait for a device, without the GIL and so that this thread can stop. False if time has expired before."""
    pause_s, longest_s = _POLL_S
    while not done():
        if expired is not None and expired():
            return False
        sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return True
