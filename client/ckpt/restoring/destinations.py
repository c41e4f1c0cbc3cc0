"""Destinations of the entries' bytes in tensors: live ones, filled in place, or new ones; and in arrays."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import TensorPart, elements, has_plain_elements, is_plain_type, like_outer
from ckpt.capture.tensors import inline_tensor, small_value, tensor_bytes
from ckpt.device import DEVICES, has_device
from ckpt.dtypes import BY_NAME, NAMES
from ckpt.restoring.gpu_copy import GpuReceiver, GpuTarget, is_direct
from ckpt.restoring.host_destinations import HostDestinations
from ckptstore.codecs.dtypes import CAST_TYPES
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import StateMismatch, UnsupportedFormat
from ckptstore.format.boxes import Box, Want, offsets, sizes, whole
from ckptstore.format.documents import JSON, Content
from ckptstore.format.trees import TAG, decode_tree, value_leaves
from ckptstore.reading.fetch import Buffers
from ckptstore.reading.source import Source
from ckptstore.reading.weights import cast_entries

CAST_ELEMENTS = 32 << 20
"""On their way into another type or layout, in host memory at a time: 128 MiB of float32, and up to one tensor more."""
_Key = tuple[str, Box, torch.device | None]
"""Entry, box, and the device if copies to it are asynchronous."""


class Destinations(HostDestinations):
    """Collects the parts of a checkpoint that a restore needs. Live tensors stay unchanged until bytes are received."""

    small = staticmethod(small_value)

    def __init__(self, content: Content) -> None:
        super().__init__(content)
        self._targets = defaultdict[_Key, list[Any]](list)
        self._given: list[tuple[str, Box, torch.Tensor]] = []
        self._hosts: dict[str, torch.Tensor] = {}  # by buffer
        self._types = defaultdict[str, set[torch.dtype]](set)  # of the targets, by entry
        self._copies: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._first: dict[object, str] = {}  # entry of each kind of wrapper, and of each wrapper
        self.waiting = defaultdict[_Key, list[Any]](list)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of an entry. Raises CorruptObject, or UnsupportedFormat for a type this torch lacks."""
        dtype, shape = self.entry(name)
        if dtype not in BY_NAME:
            raise UnsupportedFormat(f"entry {name!r} has type {dtype}, which this torch does not know", "Upgrade torch")
        return BY_NAME[dtype], shape

    def fill(self, name: str, part: TensorPart) -> None:
        """Register a live part to be filled from the entry; another dtype is cast. Of a larger one, what is also in the
        entry: the elements at its begin."""
        _, shape = self.entry(name)
        for piece in part.pieces:
            box, tensor = piece.box, piece.tensor
            if shape != part.shape:
                left = [min(n, s - o) for o, n, s in zip(offsets(box), sizes(box), shape, strict=True)]
                if min(left) <= 0:
                    continue
                box, tensor = (*offsets(box), *left), tensor[tuple(map(slice, left))]
            self.fill_box(name, box, tensor)

    def fill_box(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Register a tensor to be filled from a box of the entry. Of elements in one place the first is read."""
        self._given.append((name, box, target))
        self._types[name].add(target.dtype)
        for dimension, step in enumerate(target.stride()):
            if not step and target.numel():
                at = target.dim() + dimension
                box, target = (*box[:at], 1, *box[at + 1 :]), target.narrow(dimension, 0, 1)
        self._targets[name, box, target.device if has_device(target) else None].append(target)

    @torch.no_grad()
    def make(self, name: str, wrapper: torch.Tensor, make: Callable[[torch.Tensor], object]) -> bool:
        """Register a live wrapper, to be filled with what a function makes of the whole entry in the wrapper's type and
        on its device. False if another entry fills it. Raises StateMismatch if the function makes another kind of
        tensor, as a trial with zeros shows."""
        live, first = elements(wrapper), self._first.setdefault

        def fill(values: Any, trial: bool = False) -> None:
            found = elements(make(values.to(wrapper.device, wrapper.dtype)))
            if found.keys() != live.keys():
                raise StateMismatch(
                    f"{name}: the function of cast= makes another kind of tensor than there is here",
                    "Make it as quantize_ did here. If the restore had begun to read, build the objects again",
                )
            for kind in () if trial else live:
                live[kind].copy_(found[kind])
            gc.collect(0)  # layers that were quantized are in cycles

        if first((make, *live), name) == name:
            fill(torch.zeros(wrapper.shape), trial=True)
        self._types[name].add(wrapper.dtype)
        # As a target it is never read into: the elements arrive in host memory, and `place` copies them into it.
        self._targets[name, whole(wrapper.shape), None].append(SimpleNamespace(is_cpu=False, copy_=fill))
        return first(id(wrapper), name) == name

    def clashes(self, source: Source, checkpoint: Checkpoint) -> list[str]:
        """Reads what shares memory into a copy of it."""
        shared = defaultdict[int, dict[tuple[str, Box, int], torch.Tensor]](dict)
        for name, box, target in self._given:
            if target.numel():
                shared[_memory(target)][name, box, target.data_ptr()] = target
        shared.pop(0, None)  # no memory
        return [clash for views in shared.values() for clash in self._clash(views, source, checkpoint)]

    def _clash(
        self, views: Mapping[tuple[str, Box, int], torch.Tensor], source: Source, checkpoint: Checkpoint
    ) -> list[str]:
        """views: of one storage, by entry, box and address."""
        targets = list(views.values())
        within = sum(target.nbytes for target in targets) <= targets[0].untyped_storage().nbytes()
        if within and len({address for *_, address in views}) == len(views):
            return []
        trial, copies = Destinations(self._content), deepcopy(targets)  # which share memory as they do
        fulls = [torch.empty(copy.shape, dtype=copy.dtype, device="cpu") for copy in copies]
        for (name, box, _), copy, full in zip(views, copies, fulls, strict=True):
            trial.fill_box(name, box, full)  # first: it is read into directly, and a copy may be shared
            trial.fill_box(name, box, copy)
        trial.read(source, checkpoint)
        pairs = zip(copies, fulls, strict=True)
        if all(tensor_bytes(copy.cpu().clone().contiguous()) == tensor_bytes(full) for copy, full in pairs):
            return []
        return [f"{', '.join(dict.fromkeys(name for name, *_ in views))}: unequal, and in one place of memory here"]

    def new(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor that receives the whole entry."""
        dtype, shape = self.describe(name)
        target = torch.empty(shape, dtype=dtype, device=device)
        self.fill_box(name, whole(shape), target)
        return target

    @torch.inference_mode(False)
    def new_beside(
        self, name: str, leaf: Leaf, device: torch.device | str, dtype: torch.dtype | None = None, grown: bool = False
    ) -> torch.Tensor:
        """A new tensor for optimizer state of a parameter, with the parameter's device and layout if it has its shape.

        State of another shape is kept whole, on `device`; if it is grown, zeros surround it. dtype: None: as saved.
        """
        saved, shape = self.describe(name)
        parameter, dtype = leaf.value, dtype or saved
        if is_lazy(parameter) or (shape != leaf.part.shape and not grown):
            target = self.new(name, device)
            if not isinstance(parameter, DTensor) or not shape:
                return target
            return DTensor.from_local(target, parameter.device_mesh, run_check=False)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target = torch.empty(local.shape, dtype=dtype, device=local.device)
        if isinstance(parameter, DTensor):
            target = torch.empty_like(local, dtype=dtype) if is_plain_type(local) else target
            target = like_outer(name, parameter, target)
        if grown:
            target.zero_()
        self.fill(name, leaf.part_of(name, target))
        return target

    def refill(self, tree: JSON, path: str, template: Any) -> tuple[Any, list[str]]:
        """A tensor of the template fits if a new one would have its type, shape and device, and if nothing else is in
        its memory. It is in the value that is returned; new ones take the places of all others."""
        given = [(at, leaf) for at, leaf in value_leaves(template, path) if isinstance(leaf, torch.Tensor)]
        times = Counter(at for at, _ in given)  # a dict may hold both 1 and "1", whose paths are equal
        live = {at: leaf for at, leaf in given if times[at] == 1}
        if not live:
            return self.decode(tree, path), []
        used: dict[int, object] = {_memory(target): name for name, _, target in self._given}
        used |= {_memory(target): None for _, targets in self._copies for target in targets}
        filled: list[str] = []

        def unleaf(at: str, leaf: dict[str, Any]) -> Any:
            target, source = live.get(at), leaf.get("name", id(leaf))
            if target is None or not self._fits(target, at, leaf) or used.setdefault(_memory(target), source) != source:
                return self._unleaf(at, leaf, None)
            if "name" in leaf:
                self.fill_box(source, whole(target.shape), target.detach())
            else:
                self._copies.append((inline_tensor(at, leaf), [target]))
            filled.append(at)
            return target

        return decode_tree(tree, path, unleaf), filled

    def _fits(self, target: torch.Tensor, at: str, leaf: dict[str, Any]) -> bool:
        """Whether a tensor can take the place of the new one for a leaf."""
        if leaf[TAG] != "tensor" or not _owns_memory(target):
            return False
        if "name" in leaf:
            dtype, shape = self.describe(leaf["name"])
        else:
            small = inline_tensor(at, leaf)
            dtype, shape = small.dtype, small.shape
        device = _current(leaf["device"]) if "device" in leaf else torch.device("cpu")
        return (target.dtype, target.shape, target.device) == (dtype, shape, device)

    @torch.inference_mode(False)
    def _unleaf(self, at: str, leaf: dict[str, Any], device: torch.device | None) -> Any:
        """Tensors saved from a GPU go to `device`; by default to the current GPU of their kind, or the CPU if there is
        none. Arrays of types that numpy does not know come back as tensors."""
        if leaf[TAG] not in ("tensor", "array"):
            return self.small(at, leaf)
        if leaf[TAG] == "array":
            with suppress(UnsupportedFormat):
                return self.array_of(at, leaf)
        where = device or _current(leaf["device"]) if "device" in leaf else "cpu"
        return self.new(leaf["name"], where) if "name" in leaf else inline_tensor(at, leaf).to(where)

    def wants(self) -> list[Want]:
        """The ranges to read; each want has its own buffer."""
        return [Want(*key[:2], str(key)) for key in self._targets] + super().wants()

    def allocate(self) -> None:
        """Allocate host memory for targets that are on no such device and cannot be read into directly. When enough
        elements have some, the others wait until it has been placed."""
        cast = {  # while it is decoded, in no memory of its own
            name: NAMES[dtype]
            for name, (dtype, *others) in self._types.items()
            if self.describe(name)[0] == torch.float32 and not others and NAMES.get(dtype) in CAST_TYPES
        }
        self._content = cast_entries(self._content, cast) if cast else self._content
        self._arriving = self._content.entries.types()
        left = CAST_ELEMENTS
        for key, targets in [*self._targets.items()]:
            name, box, device = key
            if device is None:
                dtype = BY_NAME[self._arriving[name][0]]
                own = targets[0].is_cpu and is_direct(targets[0], dtype)
                if not own and left <= 0:
                    self.waiting[key] = self._targets.pop(key)
                    continue
                host = self._hosts[str(key)] = targets[0] if own else torch.empty(sizes(box), dtype=dtype, device="cpu")
                if not own or len(targets) > 1:
                    self._copies.append((host, targets))
                    left -= host.numel()
        super().allocate()

    @contextmanager
    def receiving(self) -> Iterator[Buffers]:
        """Buffers for the wants, to be filled by `reads` inside the block. Call `allocate` first.

        Bytes for a GPU have arrived when the block ends without an error.
        """
        devices = {device: DEVICES[device.type](device) for *_, device in self._targets if device is not None}
        targets = {
            str(key): GpuTarget(targets, BY_NAME[self._arriving[key[0]][0]], devices[key[2]])
            for key, targets in self._targets.items()
            if key[2] is not None
        }
        hosts = _Bytes(self._hosts, self._array_bytes())
        if not targets:
            yield hosts
            return
        with GpuReceiver(hosts, targets, self.reads).receiving() as receiver:
            yield receiver

    @torch.no_grad()
    def place(self) -> None:
        """Copy the filled buffers to every target that is not its own buffer."""
        super().place()
        for host, targets in self._copies:
            for target in targets:
                if target is not host:
                    target.copy_(host)
        self._copies.clear()
        self._hosts.clear()
        self._targets.clear()
        self._given.clear()
        if self.waiting:
            self._targets |= self.waiting
            self.waiting.clear()
            self.allocate()


def _current(kind: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != kind or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(kind, torch.accelerator.current_device_index())


def _owns_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the whole of its memory for itself, in row-major order, and no history.

    Memory that torch has not allocated may be read-only: a mapped file, the bytes of another object.
    """
    plain = has_plain_elements(tensor) and not isinstance(tensor, DTensor) and tensor.is_leaf
    plain = plain and not tensor.is_inference() and is_direct(tensor, tensor.dtype)
    storage = tensor.untyped_storage() if plain else None
    return storage is not None and 0 < tensor.nbytes == storage.nbytes() and storage.resizable()


def _memory(tensor: torch.Tensor) -> int:
    """The address of the memory that a plain tensor is in, which others may be in too."""
    return tensor.untyped_storage().data_ptr()


class _Bytes(dict[str, memoryview]):
    """The bytes of tensors and arrays. A tensor's are made when they are asked for: beside reading, at no cost."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, memoryview]) -> None:
        super().__init__(arrays)
        self._tensors = tensors

    def __missing__(self, name: str) -> memoryview:  # two threads may make the same
        found = self[name] = tensor_bytes(self._tensors[name])
        return found
