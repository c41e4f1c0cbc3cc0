"""A device that is simulated in host memory: its operations execute late, and out of order unless an event orders them.

Tensors of the CPU count as tensors of the device while it is plugged in. A launch does nothing but queue an operation.
When somebody polls an event, the head of a random stream is executed. Memory is poisoned as soon as its last owner lets
go of it, in the order of the stream that it was allocated on, as a caching allocator may reuse it then.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from ckpt import Checkpointer, device
from ckpt.host.segment import Segment
from ckpt.snapshot import overlap
from ckpt.snapshot.arena import Arena, ArenaSlot
from ckpt.snapshot.device_copies import SMALL_BYTES
from ckpt.snapshot.guard import is_in_order

DEFAULT, SIDE = "default", "side"
POISON = -77
LARGE = SMALL_BYTES // 4 + 512
"""Elements of a tensor that is not gathered with others."""
SCHEDULES = range(max(4, int(os.environ.get("CKPTD_SCHEDULES", 0))))
one_schedule = pytest.mark.parametrize("training", [0], indirect=True)
_Operation = Callable[[], object]


class SimulatedMark(device.Mark):
    def __init__(self, simulated: SimulatedDevice) -> None:
        self.reached = False
        self._device = simulated

    def reach(self) -> None:
        self.reached = True

    def done(self) -> bool:
        self._device.polls += 1
        self._device.progress()
        return self.reached


class SimulatedDevice(device.Device):
    """The device. Everything that is random follows from the seed and from the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.executed = 0
        self.polls = 0
        self._streams: dict[Hashable, deque[_Operation | SimulatedMark | threading.Event]] = defaultdict(deque)
        self._weights: dict[Hashable, float] = defaultdict(lambda: 10 ** self.random.uniform(-2, 1))
        self._lock = threading.RLock()
        self._thread = threading.local()
        self._graph: list[_Operation] | None = None
        self._pinned: dict[int, int] = {}
        self._allocated: set[int] = set()
        self._writes: dict[int, int] = {}
        self.violations: list[str] = []
        self.limit_bytes = 1 << 40
        """The largest piece of memory that can be gathered."""
        self.gathered_bytes = 0
        self.copies = 0
        """To host memory."""
        self.refuses_pins = False
        self.crosses_borders = True
        """Copies may cross from one piece of memory that was pinned to the next."""
        self.queue_size = 1 << 40
        """With as many operations pending on a stream, launches block."""
        self.node: int | None = None
        self.fails_after: int | None = None
        """Fail the copy into a slot after this many."""

    # What the library uses: see ckpt.device.Device.

    def current(self) -> Hashable:
        return getattr(self._thread, "stream", DEFAULT)

    def mark(self, side: bool) -> SimulatedMark:
        return self.record(SIDE if side else self.current())

    def wait(self, mark: device.Mark, side: bool) -> None:
        assert isinstance(mark, SimulatedMark)
        with self._lock:
            self._streams[SIDE if side else self.current()].append(mark)

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        for view, tensor in zip(views, tensors, strict=True):
            own = view.untyped_storage().data_ptr() in self._allocated
            self.copies += 1
            if self.fails_after is not None and not own:
                self.fails_after -= 1
                if self.fails_after < 0:
                    self.fails_after = None
                    raise RuntimeError("out of memory")
            to, source, size = view.data_ptr(), tensor.data_ptr(), tensor.nbytes
            assert self._is_pinned(to, size), "an asynchronous copy into pageable memory"
            self._writes[to] = size
            # As torch does with its own pinned memory, but not with that of others.
            kept = view if own else None
            spread = _spread(tensor)
            self._queue(SIDE if side else self.current(), partial(self._move, to, source, size, kept, spread))

    def run(self, work: _Operation) -> None:
        self._queue(SIDE, work)

    def gather(self, tensors: Sequence[torch.Tensor], side: bool) -> torch.Tensor:
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if num_bytes > self.free_bytes():
            raise RuntimeError("out of memory")
        stream = SIDE if side else self.current()
        memory = self._allocate(np.zeros(num_bytes, np.uint8), stream).view(tensors[0].dtype)
        at = memory.data_ptr()
        self.gathered_bytes += num_bytes
        for tensor in tensors:
            self._queue(stream, partial(_gather, at, tensor.data_ptr(), _spread(tensor), tensor.nbytes))
            at += tensor.nbytes
        return memory

    def read(self, addresses: device.Addresses, size: int) -> torch.Tensor:
        memory = self.pinned(len(addresses) * size)
        if memory.nbytes > self.free_bytes():
            raise RuntimeError("out of memory")
        self._queue(self.current(), partial(_read, memory, addresses.tolist(), size))
        return memory.view(-1, size)

    def digest(self, into: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        assert self._is_pinned(into.data_ptr(), into.nbytes)
        for _ in range(device.DIGEST_LAUNCHES * len(tensors)):
            self._queue(SIDE, bool)
        self._queue(SIDE, lambda: into.copy_(device.digests(tensors)))

    def free_bytes(self) -> int:
        return self.limit_bytes

    def pinned(self, num_bytes: int) -> torch.Tensor:
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._pinned[memory.data_ptr()] = num_bytes
        self._allocated.add(memory.data_ptr())
        return memory

    def pin(self, address: int, num_bytes: int) -> int:
        if self.refuses_pins:
            return 2
        self._pinned[address] = num_bytes
        return 0

    def unpin(self, address: int) -> int:
        return 0 if self._pinned.pop(address, None) is not None else 1

    def crosses(self, address: int) -> bool:
        return self.crosses_borders

    def numa_node(self) -> int | None:
        return self.node

    # What a training program uses.

    @contextmanager
    def stream(self, name: Hashable) -> Iterator[None]:
        before = self.current()
        self._thread.stream = name
        try:
            yield
        finally:
            self._thread.stream = before

    def record(self, stream: Hashable) -> SimulatedMark:
        mark = SimulatedMark(self)
        self._queue(stream, mark.reach)
        return mark

    def launch(self, kernel: _Operation) -> None:
        """Queue a kernel on the current stream, or keep it in the graph that is being captured."""
        if self._graph is not None:
            self._graph.append(kernel)
        else:
            self._queue(self.current(), kernel)
            if self.random.random() < 0.2:
                self.progress()

    @contextmanager
    def graph(self) -> Iterator[list[_Operation]]:
        self._graph = []
        try:
            yield self._graph
        finally:
            self._graph = None

    def is_capturing(self) -> bool:
        return self._graph is not None

    @contextmanager
    def paused(self, stream: Hashable) -> Iterator[None]:
        released = threading.Event()
        with self._lock:
            self._streams[stream].appendleft(released)
        try:
            yield
        finally:
            released.set()

    def hang(self, stream: Hashable | None = None) -> threading.Event:
        """A stream, by default the current one, stops here until the event is set."""
        released = threading.Event()
        with self._lock:
            self._streams[stream or self.current()].append(released)
        return released

    def tensor(self, value: float, size: int = 512) -> torch.Tensor:
        """A tensor, allocated on the current stream."""
        return self._allocate(np.full(size, value, np.float32), self.current())

    def _allocate(self, memory: np.ndarray[Any, Any], stream: Hashable) -> torch.Tensor:
        owner = memory.view()
        poison = partial(memory.view(np.int8).fill, POISON)
        weakref.finalize(owner, self._streams[stream].append, poison).atexit = False
        return torch.from_numpy(owner)

    def progress(self) -> None:
        with self._lock:
            for _ in range(self.random.randint(1, 4)):
                ready = [name for name, queue in self._streams.items() if queue and self._is_ready(queue[0])]
                if not ready:
                    return
                name = self.random.choices(ready, [self._weights[name] for name in ready])[0]
                operation = self._streams[name].popleft()
                if callable(operation):
                    operation()
                    self.executed += 1

    @property
    def registered(self) -> set[int]:
        """The addresses that were pinned and not allocated so."""
        return set(self._pinned) - self._allocated

    def queued(self, stream: Hashable) -> int:
        return len(self._streams[stream])

    def synchronize(self) -> None:
        while any(self._streams.values()):
            self.progress()

    def check_unused(self, segment: Segment) -> None:
        """Nothing that is queued may write to a slot that is given to the next snapshot."""
        begin = ctypes.addressof(segment.map)
        if any(begin <= to < begin + segment.num_bytes for to in list(self._writes)):
            self.violations.append("a slot is idle while the device writes to it")

    def _move(self, to: int, source: int, size: int, _: object, spread: torch.Tensor | None) -> None:
        _gather(to, source, spread, size)
        self._writes.pop(to, None)

    def _queue(self, stream: Hashable, operation: _Operation) -> None:
        while len(self._streams[stream]) >= self.queue_size:
            self.progress()
            time.sleep(1e-3)
        with self._lock:
            self._streams[stream].append(operation)

    def _is_ready(self, operation: Any) -> bool:
        if isinstance(operation, SimulatedMark):
            return operation.reached
        return not isinstance(operation, threading.Event) or operation.is_set()

    def _is_pinned(self, address: int, num_bytes: int) -> bool:
        end = address + num_bytes
        while address < end:
            chunk = next((at + size for at, size in self._pinned.items() if at <= address < at + size), None)
            if chunk is None:
                return False
            if chunk < end and not self.crosses_borders:
                return False
            address = chunk
        return True


class PromptDevice(SimulatedDevice):
    """A device whose current streams are as fast as the CPU, for training loops of torch's own kernels.

    Only the side stream is late. What is queued on another stream is executed before the call returns.
    """

    def copy(self, views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], side: bool) -> None:
        super().copy(views, tensors, side)
        self._drain(side)

    def wait(self, mark: device.Mark, side: bool) -> None:
        super().wait(mark, side)
        self._drain(side)

    def mark(self, side: bool) -> SimulatedMark:
        found = super().mark(side)
        self._drain(side)
        return found

    def _drain(self, side: bool) -> None:
        while not side and self._streams[self.current()]:
            self.progress()


@contextmanager
def plugged_in(seed: int, kind: type[SimulatedDevice] = SimulatedDevice) -> Iterator[SimulatedDevice]:
    simulated, release = kind(seed), Arena.release

    def checked_release(arena: Arena, slot: ArenaSlot | None) -> None:
        if slot is not None and slot.number in arena._slots:
            simulated.check_unused(slot.segment)
        release(arena, slot)

    with (
        patch.dict(device.DEVICES, {"cpu": lambda _: simulated}),
        patch.object(overlap, "is_capturing", simulated.is_capturing),
        patch.object(Arena, "release", checked_release),
    ):
        yield simulated
    assert not simulated.violations


def _spread(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor whose bytes are not its elements, in order, for the time of the kernel that reads it."""
    return None if is_in_order(tensor) else tensor.detach()


def _gather(to: int, source: int, spread: torch.Tensor | None, num_bytes: int) -> None:
    """A kernel. It keeps no memory that is read by its address."""
    kept = None if spread is None else spread.resolve_conj().resolve_neg().contiguous()
    ctypes.memmove(to, source if kept is None else kept.data_ptr(), num_bytes)


def _read(memory: torch.Tensor, addresses: Sequence[int], size: int) -> None:
    for number, address in enumerate(addresses):
        ctypes.memmove(memory.data_ptr() + number * size, address, size)


class SimulatedSGD(Optimizer):
    """Its step adds one to each element of parameters and momenta, in kernels that torch's counters do not see."""

    def __init__(self, simulated: SimulatedDevice, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._device = simulated
        for parameter in parameters:
            self.state[parameter]["momentum"] = simulated.tensor(float(parameter.data_ptr() % 97), parameter.numel())

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter, self.state[parameter]["momentum"]):
                    self._device.launch(add_one(tensor))


def add_one(tensor: torch.Tensor) -> _Operation:
    """A kernel. It has an address, and does not keep the memory."""
    address, size = tensor.data_ptr(), tensor.numel()

    def kernel() -> None:
        np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))[:] += 1

    return kernel


class Training:
    """Two optimizers, four parameters and a buffer on the device; and what their values are in program order."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self.device = simulated
        self.model = nn.Module()
        for i in range(4):
            size = LARGE if i % 2 == 0 else 512
            self.model.register_parameter(f"w{i}", nn.Parameter(simulated.tensor(100.0 * i, size)))
        with simulated.stream("other"):
            self.model.register_buffer("average", simulated.tensor(5.0))
        parameters = list(self.model.parameters())
        self.first, self.second = SimulatedSGD(simulated, parameters[:2]), SimulatedSGD(simulated, parameters[2:])
        self.optim = {"first": self.first, "second": self.second}
        self.values = {f"model/{name}": tensor[0].item() for name, tensor in self.model.state_dict().items()}
        for key, optim in self.optim.items():
            for name, parameter in self.model.named_parameters():
                if parameter in optim.state:
                    momentum = optim.state[parameter]["momentum"][0].item()
                    self.values[f"optim.{key}/state/{name}/momentum"] = momentum
        self.saved: dict[int, dict[str, float]] = {}
        self.graph: list[Any] | None = None

    def save(self, checkpointer: Checkpointer, step: int) -> Any:
        handle = checkpointer.save_async(self.model, self.optim, step)
        self.saved[step] = dict(self.values)
        return handle

    def step(self, stream: str = DEFAULT) -> None:
        """The second optimizer steps on a stream, which waits for the backward pass; or its graph is replayed."""
        device = self.device
        after_backward = device.record(DEFAULT)
        self.first.step()
        with device.stream(stream):
            device.wait(after_backward, side=False)
            if self.graph is None:
                self.second.step()
            else:
                for kernel in self.graph:
                    device.launch(kernel)
            joined = device.record(stream)
        device.wait(joined, side=False)
        self._count(("w0", "w1", "w2", "w3"))

    def turn(self, name: str) -> None:
        """One optimizer steps, on its own stream, in the order of the default stream."""
        device = self.device
        before = device.record(DEFAULT)
        with device.stream(name):
            device.wait(before, side=False)
            self.optim[name].step()
            joined = device.record(name)
        device.wait(joined, side=False)
        self._count(("w0", "w1") if name == "first" else ("w2", "w3"))

    def capture(self) -> None:
        """Capture the second optimizer's step into a graph; nothing is executed."""
        with self.device.graph() as self.graph:
            self.second.step()

    def replace_average(self) -> None:
        """Put new memory in the place of the average's: the old memory is free."""
        with self.device.stream("other"):
            value = self.values["model/average"] + 1
            self.model.average.data = self.device.tensor(value)
            self.values["model/average"] = value

    def check(self, checkpointer: Checkpointer) -> None:
        """Every committed checkpoint holds the values at its call."""
        for step, values in self.saved.items():
            found = {name: sorted(set(tensor.tolist())) for name, tensor in checkpointer.load(step).items()}
            assert found == {name: [value] for name, value in values.items()}, step

    def _count(self, names: tuple[str, ...]) -> None:
        for entry in self.values:
            if entry.split("/")[-1] in names or any(f"/{name}/" in entry for name in names):
                self.values[entry] += 1

    @contextmanager
    def run(self, folder: Path, captured: bool = False, **options: Any) -> Iterator[Checkpointer]:
        """A prepared run, after one step; its second optimizer may be captured. At its end, all it saved is right."""
        with open_run(folder, **options) as checkpointer:
            checkpointer.prepare(self.model, self.optim)
            self.step()
            if captured:
                self.capture()
            yield checkpointer
            checkpointer.wait()
            self.check(checkpointer)


def open_run(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(str(folder), run="r", writer="thread", compress="off", **options)
