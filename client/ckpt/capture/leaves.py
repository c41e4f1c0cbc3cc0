"""Collecting the leaves of a state: tensors that go into the shard, small values that go into a tree.

Nothing is copied here: leaves alias live tensors until they are staged.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, overload

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckpt.capture.ownership import Ownership
from ckpt.capture.parts import Flat, TensorPart, part_of
from ckpt.capture.reads import Number, SmallReads
from ckpt.capture.wrapped import inner_tensors, is_plain_type, kind_of
from ckpt.device import has_device
from ckpt.dtypes import BY_NAME, NAMES
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.dtypes import NUMPY
from ckptstore.format.shards import Slice
from ckptstore.format.trees import TAG, decode_bytes, encode_bytes, encode_tree, merge_trees, unsupported, with_records

_BUFFER_TYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8})
"""Those that Python's own views of memory know; there are more."""
_INLINE_BYTES = 64 << 10
"""Rank-local tensors up to this size lie in the receipt, so that a rank without other state writes no shard."""


class Change(Enum):
    """When the memory of a leaf may change, as far as its role in the training loop shows."""

    ANY_TIME = 0
    """Buffers, gradients, averages, whatever a caller passed."""
    STEP = 1
    """Parameters that an optimizer updates, and its state: they change in `optim.step()`."""
    NEVER = 2
    """Frozen parameters, unless the caller changes them by other means."""


class StateLeaf(NamedTuple):
    """A tensor to be staged, and what of which entry it is."""

    slice: Slice
    tensor: torch.Tensor
    origin: torch.Tensor
    """The live tensor of the training loop, of which `tensor` is all or a part."""
    change: Change = Change.ANY_TIME


class Leaves(Sequence[StateLeaf]):
    """Leaves, column by column: every save looks at all of them, and should neither make nor touch an object for each
    that it can do without."""

    def __init__(
        self,
        slices: list[Slice] | None = None,
        tensors: list[torch.Tensor] | None = None,
        origins: list[torch.Tensor] | None = None,
        changes: list[Change] | None = None,
    ) -> None:
        """The lists are used without a copy, and never changed. origins: None if each tensor is its own."""
        self.slices = slices or []
        self.tensors = tensors or []
        self.origins = self.tensors if origins is None else origins
        self.changes = changes or []
        self._own = False
        """Whether this object alone holds the lists."""

    def __len__(self) -> int:
        return len(self.slices)

    @overload
    def __getitem__(self, index: int) -> StateLeaf: ...
    @overload
    def __getitem__(self, index: slice) -> Leaves: ...
    def __getitem__(self, index: int | slice) -> StateLeaf | Leaves:
        if isinstance(index, slice):
            return self.pick(range(len(self))[index])
        return StateLeaf(self.slices[index], self.tensors[index], self.origins[index], self.changes[index])

    @property
    def gpu(self) -> torch.device | None:
        """One that some of them live on; None if there is none."""
        return next((tensor.device for tensor in self.tensors if tensor.is_cuda), None)

    def append(self, leaf: StateLeaf) -> None:
        """One more."""
        if not self._own:
            self._own = True
            self.slices, self.tensors = list(self.slices), list(self.tensors)
            self.origins, self.changes = list(self.origins), list(self.changes)
        self.slices.append(leaf.slice)
        self.tensors.append(leaf.tensor)
        self.origins.append(leaf.origin)
        self.changes.append(leaf.change)

    def pick(self, indexes: Iterable[int]) -> Leaves:
        """Some of them, in another order if need be."""
        chosen = list(indexes)
        return Leaves(
            [self.slices[i] for i in chosen],
            [self.tensors[i] for i in chosen],
            None if self.origins is self.tensors else [self.origins[i] for i in chosen],
            [self.changes[i] for i in chosen],
        )


@dataclass(slots=True)
class Captured:
    """What one rank saves: leaves for its shard, trees for its receipt."""

    leaves: Leaves = field(default_factory=Leaves)
    trees: dict[str, JSON] = field(default_factory=dict)
    local: dict[str, JSON] = field(default_factory=dict)
    unwritten: dict[str, Any] = field(default_factory=dict)
    """More values for `local`, which no longer change."""
    reads: SmallReads = field(default_factory=SmallReads)
    late: list[tuple[dict[str, JSON], torch.Tensor]] = field(default_factory=list)
    """Tensors of trees that are still being read from a GPU, and the memory that will hold their elements."""
    aliases: dict[str, str] = field(default_factory=dict)
    sameness: object | None = None
    """If two captures have the same object here, their leaves are the same slices and lie in the same memory."""

    def write(self) -> dict[str, JSON]:
        """All of `local`. Completes `trees`. Of any thread: what need not be done while training waits is done now."""
        self.reads.finish()
        for leaf, host in self.late:
            leaf["data"] = encode_bytes(tensor_bytes(host))
        self.late = []
        for item, value in self.unwritten.items():
            self.local[item] = encode_tree(value, item, with_records(_unwritten_leaf))
        self.unwritten = {}
        return self.local


class Collector:
    """Builds a Captured, item by item. Used by one thread for one save."""

    def __init__(self, ownership: Ownership) -> None:
        self.captured = Captured()
        self.ownership = ownership
        self._prefix = f"rank-{ownership.rank:05d}/"
        self._names: MutableMapping[str, None] = {}
        self._seen: MutableMapping[tuple[object, ...], str] = {}

    def beside(self, captured: Captured) -> Collector:
        """Another one that goes on with what this one has found so far, for the memory it lies in is the same; this one
        then finds no more."""
        other = Collector(self.ownership)
        other.captured, other._names, other._seen = captured, ChainMap({}, self._names), ChainMap({}, self._seen)
        return other

    def shared(self, unit: str, path: str, value: Any, change: Change, flat: Flat | None = None) -> JSON:
        """The tree of state that belongs to no single rank. Of its tensors the shard gets what this rank writes.

        A wrapper is a dict of its inner tensors.
        """

        def leaf(at: str, found: Any) -> JSON:
            if isinstance(found, torch.Tensor):
                if (inner := inner_tensors(at, found)) is not None:
                    return encode_tree(inner, at, leaf)
                return {TAG: "tensor", "name": self._store_part(unit, at, found, change, flat), **_device(found)}
            if isinstance(found, np.ndarray):
                array = _from_array(at, found)
                return {TAG: "array", "name": self._store_part(unit, at, array, Change.ANY_TIME)}
            return small_leaf(at, found)

        return encode_tree(value, path, with_records(leaf))

    def inline(self, path: str, value: Any) -> JSON:
        """The tree of small state, tensors and all."""
        return encode_tree(value, path, with_records(self._inline_leaf))

    def joined(self, path: str, values: Iterable[Any]) -> JSON:
        """The trees of small states as one tree."""
        merged: JSON = {}
        for value in values:
            merged = merge_trees(merged, self.inline(path, value), path)
        return merged

    def add_local(self, item: str, value: Any) -> None:
        """State of this rank alone: small tensors stay in the tree, large ones go into the shard."""
        self.captured.local[item] = encode_tree(value, item, with_records(self._local_leaf))

    def add_shared(self, item: str, value: Any) -> None:
        """State that all ranks hold alike: rank 0 keeps it, every tensor of it as an entry."""
        if self.ownership.rank == 0:
            leaf = with_records(lambda path, found: self._leaf(path, found, path))
            self.captured.trees[item] = encode_tree(value, item, leaf)

    def _local_leaf(self, path: str, value: Any) -> JSON:
        if isinstance(value, torch.Tensor):
            large = _not_distributed(path, value).numel() * value.element_size() > _INLINE_BYTES
        else:
            large = isinstance(value, np.ndarray) and value.nbytes > _INLINE_BYTES
        return self._leaf(path, value, self._prefix + path) if large else self._inline_leaf(path, value)

    def _inline_leaf(self, path: str, value: Any) -> JSON:
        if not isinstance(value, torch.Tensor) or not has_device(value):
            return _inline_leaf(path, value)
        leaf: dict[str, JSON] = {TAG: "tensor", "dtype": dtype_name(path, value), "shape": list(value.shape)}
        leaf |= _device(value)
        self.captured.late.append((leaf, self.captured.reads.read(value)))
        return leaf

    def _leaf(self, path: str, value: Any, name: str) -> JSON:
        """The tree of a tensor or array that becomes an entry of this name, or of another small value."""
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._store(name, _not_distributed(path, value)), **_device(value)}
        if isinstance(value, np.ndarray):
            return {TAG: "array", "name": self._store(name, _from_array(path, value))}
        return small_leaf(path, value)

    def _store(self, path: str, tensor: torch.Tensor) -> str:
        """Add a whole tensor of this rank alone to the shard; returns the name of its entry."""
        dtype = dtype_name(path, tensor)
        name, first = self._name(path, dtype, part_of(path, tensor), self.ownership.rank)
        if name != first:
            self.captured.aliases[name] = first
        else:
            self._add(first, dtype, part_of(path, tensor), tensor, Change.ANY_TIME)
        return first

    def _store_part(self, unit: str, path: str, tensor: torch.Tensor, change: Change, flat: Flat | None = None) -> str:
        """Add what this rank writes of a shared tensor to the shard; returns the name of its entry."""
        dtype, part = dtype_name(path, tensor), part_of(path, tensor, flat)
        name, first = self._name(path, dtype, part, self.ownership.owner.get(unit))
        if name != first:
            if self.ownership.owns(unit):
                self.captured.aliases[name] = first
        elif self.ownership.writes(unit, part):
            self._add(first, dtype, part, tensor, change)
        return first

    def _add(self, name: str, dtype: str, part: TensorPart, origin: torch.Tensor, change: Change) -> None:
        for piece in part.pieces:
            self.captured.leaves.append(
                StateLeaf(Slice(name, dtype, part.shape, piece.box), piece.tensor, origin, change)
            )

    def _name(self, path: str, dtype: str, part: TensorPart, owner: int | None) -> tuple[str, str]:
        """A name that is not in use, and the name under which the same memory was seen first.

        Memory that belongs to several owners (a step count of many parameters) is kept once for each: ranks that hold
        other parameters see another one first.
        """
        # A dict may hold both 1 and "1", whose paths are equal.
        name, count = path, 1
        while name in self._names:
            count += 1
            name = f"{path}#{count}"
        self._names[name] = None
        if not part.pieces or not part.pieces[0].tensor.numel():
            return name, name
        local = part.pieces[0].tensor
        if not local.untyped_storage().data_ptr():
            raise UnsupportedObject(
                f"tensor at {path!r} has {local.numel()} elements but no memory",
                "Save when its storage is allocated: `untyped_storage().resize_(0)` or a wrapper has freed it",
            )
        key = (
            local.device, local.data_ptr(), dtype, part.shape, part.boxes, local.stride(), local.is_conj(),
            local.is_neg(), owner,
        )  # fmt: skip
        return name, self._seen.setdefault(key, name)


def check_local(item: str, value: Any) -> None:
    """UnsupportedObject if a value of one rank cannot be saved. Copies nothing."""

    def leaf(path: str, found: Any) -> JSON:
        if not isinstance(found, (torch.Tensor, np.ndarray)):
            return small_leaf(path, found)
        tensor = _not_distributed(path, found) if isinstance(found, torch.Tensor) else _from_array(path, found)
        return dtype_name(path, tensor)

    encode_tree(value, item, with_records(leaf))


def _not_distributed(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        raise UnsupportedObject(
            f"the tensor at {path!r} is distributed over ranks, and only modules and optimizers are saved so",
            "Pass the module or optimizer itself instead of its state_dict",
        )
    return tensor


def inline_tensor(path: str, leaf: dict[str, Any]) -> torch.Tensor:
    """The tensor that lies in a tree itself. Raises CorruptObject if it is malformed."""
    try:
        data, dtype, shape = bytearray(decode_bytes(leaf["data"])), BY_NAME[leaf["dtype"]], leaf["shape"]
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed tensor: {error}") from error


def small_value(path: str, leaf: dict[str, Any]) -> Any:
    """The value of a tag that `small_leaf` wrote. Raises CorruptObject."""
    try:
        tag, value = leaf[TAG], leaf["v"]
        if tag == "size":
            return torch.Size(value)
        if tag == "dtype":
            return BY_NAME[value]
        if tag == "device":
            return torch.device(value)
        if tag == "scalar":
            return np.frombuffer(decode_bytes(value), dtype=NUMPY[leaf["dtype"]])[0]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed value: {error}") from error
    raise CorruptObject(f"tree at {path!r} holds the unknown tag {tag!r}")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    if not tensor.numel():
        return memoryview(bytearray())
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype in _BUFFER_TYPES:
        return plain.numpy().data.cast("B")  # a third of what two views cost, for each tensor of a state
    return plain.reshape(-1).view(torch.uint8).numpy().data


def small_leaf(path: str, value: Any) -> JSON:
    """The tree of a small value that is no plain Python. Raises UnsupportedObject."""
    if isinstance(value, np.generic) and value.dtype.name in NUMPY:
        return {TAG: "scalar", "dtype": value.dtype.name, "v": encode_bytes(value.tobytes())}
    kind = type(value)
    if kind is torch.Size:
        return {TAG: "size", "v": list(value)}
    if kind is torch.dtype and value in NAMES:
        return {TAG: "dtype", "v": NAMES[value]}
    if kind is torch.device:
        return {TAG: "device", "v": str(value)}
    if isinstance(value, DataLoader) and not hasattr(value, "state_dict"):
        raise UnsupportedObject(
            f"the {kind.__name__} at {path!r} has no state_dict, so that its position cannot be saved",
            "Iterate over ckpt.data.resumable(loader) and pass that, or use StatefulDataLoader of torchdata",
        )
    raise unsupported(path, value)


def _inline_leaf(path: str, value: Any) -> JSON:
    if isinstance(value, np.ndarray):
        return {TAG: "array", **_inline(path, _from_array(path, value))}
    if isinstance(value, torch.Tensor):
        return {TAG: "tensor", **_inline(path, value), **_device(value)}
    return small_leaf(path, value)


def _unwritten_leaf(path: str, value: Any) -> JSON:
    if isinstance(value, Number):
        return encode_tree(value.tensor.item(), path, _inline_leaf)
    return _inline_leaf(path, value)


def _inline(path: str, tensor: torch.Tensor) -> dict[str, Any]:
    dtype = dtype_name(path, tensor)
    host = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return {"dtype": dtype, "shape": list(tensor.shape), "data": encode_bytes(tensor_bytes(host))}


def _device(tensor: torch.Tensor) -> dict[str, str]:
    # A restore puts the tensor where its kind of device is now, not on a numbered one.
    return {} if tensor.device.type == "cpu" else {"device": tensor.device.type}


def dtype_name(path: str, tensor: torch.Tensor) -> str:
    """The format's name of a tensor's type. Raises UnsupportedObject for tensors that are not plain elements."""
    if not is_plain_type(tensor) or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = f"{kind_of(tensor)} with layout {tensor.layout} on device {tensor.device}"
        raise UnsupportedObject(f"tensor at {path!r} is a {kind}, which cannot be stored", "Store dense tensors")
    if tensor.dtype not in NAMES:
        raise UnsupportedObject(f"tensor at {path!r} has type {tensor.dtype}", "Convert it to another type")
    return NAMES[tensor.dtype]


def _from_array(path: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    # dtype.name does not distinguish byte orders.
    if type(array) is not np.ndarray or NUMPY.get(array.dtype.name) != array.dtype:
        raise UnsupportedObject(
            f"array at {path!r} is a {type(array).__name__} of type {array.dtype}",
            "Store plain arrays of numbers or booleans in native byte order",
        )
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)
