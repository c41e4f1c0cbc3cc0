"""Tensors as leaves: of modules and optimizers, and in values. Copies nothing: leaves alias live tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ckpt.capture import collector
from ckpt.capture.arrays import ArrayPart, array_part
from ckpt.capture.collector import Collector
from ckpt.capture.leaves import Number
from ckpt.capture.parameters import Leaf
from ckpt.capture.parts import (
    TensorPart,
    class_name,
    has_plain_elements,
    inner_tensors,
    is_plain_type,
    kind_of,
    part_of,
)
from ckpt.device import has_device
from ckpt.dtypes import BY_NAME, NAMES
from ckptstore.errors import CorruptObject, StateMismatch, UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.trees import (
    TAG,
    decode_bytes,
    decode_tree,
    encode_bytes,
    encode_tree,
    mapping,
    unsupported,
    with_records,
)

_KINDS: Mapping[str, Callable[[Any], Any]] = {"size": torch.Size, "dtype": BY_NAME.__getitem__, "device": torch.device}
_SAMPLED = 64  # elements
_BUFFER_TYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8})
"""Those that Python's own views of memory know; there are more."""


def small_leaf(path: str, value: Any) -> JSON:
    """The tree of a leaf that lies in the tree itself: tensors and all. Raises UnsupportedObject."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return {**_header(path, value), "data": encode_bytes(tensor_bytes(on_host(value)))}
    if isinstance(value, Number):
        return encode_tree(value.tensor.item(), path, small_leaf)
    if kind is torch.Size:
        return {TAG: "size", "v": list(value)}
    if kind is torch.dtype:
        if value not in NAMES:
            raise UnsupportedObject(f"state at {path!r} is {value}", "Leave quantized modules out of what is saved")
        return {TAG: "dtype", "v": NAMES[value]}
    if kind is torch.device:
        return {TAG: "device", "v": str(value)}
    if isinstance(value, DataLoader) and not hasattr(value, "state_dict"):
        raise UnsupportedObject(
            f"the {kind.__name__} at {path!r} has no state_dict, so that its position cannot be saved",
            "Iterate over ckpt.data.resumable(loader) and pass that, or use StatefulDataLoader of torchdata",
        )
    return collector.small_leaf(path, value)


def num_bytes(path: str, value: Any) -> int:
    """The size of a tensor or array, about; 0 for other values. Raises UnsupportedObject for what cannot be saved."""
    if not isinstance(value, torch.Tensor):
        return collector.num_bytes(path, value)
    dtype_name(path, whole(path, value))
    return value.nbytes


class TensorCollector(Collector):
    """Also collects tensors: those of values, and the state of modules and optimizers."""

    small, num_bytes = staticmethod(small_leaf), staticmethod(num_bytes)

    def add_state(self, trees: dict[str, JSON], name: str, leaf: Leaf, path: str, value: Any) -> None:
        """Add a leaf's state, which belongs to no single rank. Of its tensors the shard gets what this rank writes; its
        tree is added to `trees` on the rank that owns it. A wrapper is a dict of its inner tensors.
        """

        def node(at: str, found: Any) -> JSON:
            if isinstance(found, torch.Tensor):
                if (inner := inner_tensors(at, found)) is not None:
                    trees = {name: encode_tree(one, f"{at}/{name}", node) for name, one in inner.items()}
                    return mapping(trees, **({} if found is leaf.value else _wrapper(at, found, leaf)))
                plain = isinstance(leaf.value, DTensor) and not isinstance(found, DTensor) and found.dim()
                stored = {TAG: "tensor", "name": self._store_leaf(at, found, leaf), **_device(found)}
                return stored | ({"plain": True} if plain else {})
            if isinstance(found, np.ndarray):
                return {TAG: "array", "name": self._store(at, array_part(at, found), leaf.unit, leaf.change)}
            return small_leaf(at, found)

        tree = encode_tree(value, path, with_records(node))
        if self.ownership.owns(leaf.unit):
            trees[name] = tree

    def _compare(self, path: str, tensor: torch.Tensor, leaf: Leaf) -> None:
        """Have a plain tensor that several ranks hold compared, or kept for each of them."""
        unit = leaf.unit
        if unit in self.ownership.per_rank:
            if not self.ownership.owns(unit):
                self._store_leaf(self._prefix + path, tensor)
        elif len(self.ownership.holders.get(unit, ())) > 1:
            sharded = isinstance(leaf.value, DTensor) or leaf.layout is not None
            self.copies[not sharded or path.endswith("/step")].append((path, tensor))

    def add_digests(self, alike: Iterable[tuple[str, Any]], sampled: Iterable[tuple[str, Any]]) -> None:
        """Add the digests of all elements of copies, and of some."""
        captured, samples = self.captured, [(path, first_elements(tensor)) for path, tensor in sampled]
        for digests, copies in ((captured.replicas.alike, alike), (captured.replicas.sampled, samples)):
            hosts = [(path, captured.reads.read(tensor.clone())) for path, tensor in copies]
            captured.late.append(partial(digests.update, ((path, digest(host)) for path, host in hosts)))

    def _inline_leaf(self, path: str, value: Any) -> JSON:
        if not isinstance(value, torch.Tensor) or not has_device(value):
            return small_leaf(path, value)
        leaf, host = _header(path, value), self.captured.reads.read(value)
        self.captured.late.append(lambda: leaf.update(data=encode_bytes(tensor_bytes(host))))
        return leaf

    def _leaf(self, path: str, value: Any, name: str) -> JSON:
        """The tree of a tensor or array that becomes an entry of this name, or of another small value."""
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "name": self._store_leaf(name, whole(path, value)), **_device(value)}
        return super()._leaf(path, value, name)

    def _store_leaf(self, path: str, tensor: torch.Tensor, leaf: Leaf | None = None) -> str:
        """Add what this rank writes of a tensor to the shard; returns the name of its entry.

        leaf: the one that it is, or is the state of; None: it belongs to this rank alone.
        """
        dtype = dtype_name(path, tensor)
        part = part_of(path, tensor) if leaf is None else leaf.part_of(path, tensor)
        written = ArrayPart(dtype, part.shape, part.pieces, _memory_key(path, part), part.ranks, part.holders)
        if leaf is None:
            return self._store(path, written, origin=tensor)
        if part.ranks is None:
            self._compare(path, tensor, leaf)
        return self._store(path, written, leaf.unit, leaf.change, tensor)


def _wrapper(path: str, tensor: torch.Tensor, leaf: Leaf) -> dict[str, JSON]:
    """The recipe of a wrapper from its inner tensors. Raises UnsupportedObject for a sharded one, unless the
    parameter is one, too."""
    if isinstance(tensor, DTensor):
        if is_plain_type(leaf.value):
            raise unsupported(path, tensor._local_tensor)
        return {}
    made_with = (tensor.__tensor_flatten__()[1], tensor.shape, tensor.stride())  # type: ignore[attr-defined]
    return {"class": class_name(type(tensor)), "with": encode_tree(made_with, path, small_leaf)}


def _unflatten(path: str, leaf: Mapping[str, Any]) -> Any:
    """The wrapper of a tree, around tensors that may still be filled. Imports nothing: its class must be loaded."""
    kinds: list[Any] = [torch.Tensor]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in reversed(kinds):
        if class_name(kind) == leaf["class"]:
            return kind.__tensor_unflatten__(leaf["v"], *decode_tree(leaf["with"], path, small_value))
    raise StateMismatch(
        f"tensor at {path!r} is a {leaf['class']}, which this process does not have",
        "Import the module that defines it, and build the optimizer as it was at the save",
    )


def _memory_key(path: str, part: TensorPart) -> object:
    """Equal for tensors that lie alike in the same memory. Raises UnsupportedObject for one without memory."""
    if not part.pieces or not part.pieces[0].tensor.numel():
        return object()
    local = part.pieces[0].tensor
    if not local.untyped_storage().data_ptr():
        raise UnsupportedObject(
            f"tensor at {path!r} has {local.numel()} elements but no memory on device {local.device}",
            "Save when its storage is allocated: `untyped_storage().resize_(0)` or a wrapper has freed it. Devices "
            "without addresses (XLA, Gaudi in lazy mode) are not supported: save copies on the CPU",
        )
    address, view = (local.device, local.data_ptr()), (local.stride(), local.is_conj(), local.is_neg())
    return address, part.dtype, part.shape, part.boxes, view


def whole(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that this rank holds whole. Raises UnsupportedObject for one that is distributed."""
    if isinstance(tensor, DTensor):
        raise UnsupportedObject(
            f"the tensor at {path!r} is distributed over ranks, and only modules and optimizers are saved so",
            "Pass the module or optimizer itself instead of its state_dict",
        )
    return tensor


def first_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, most often a view."""
    tensor = tensor.detach()
    while tensor.dim() > 1 and len(tensor) and not tensor.is_contiguous():  # else a reshape would copy all of it
        tensor = tensor[0]
    return tensor.reshape(-1)[:_SAMPLED]


def digest(tensor: torch.Tensor) -> str:
    """The hash of the bytes of a tensor."""
    # A copy: torch refuses to resize a storage once numpy has seen its memory.
    return xxhash.xxh3_64_hexdigest(tensor_bytes(on_host(tensor).clone()))


def inline_tensor(path: str, leaf: dict[str, Any]) -> torch.Tensor:
    """The tensor that lies in a tree itself. Raises CorruptObject if it is malformed."""
    try:
        data, dtype, shape = bytearray(decode_bytes(leaf["data"])), BY_NAME[leaf["dtype"]], leaf["shape"]
        if not data:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape).clone()
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptObject(f"tree at {path!r} holds a malformed tensor: {error}") from error


def small_value(path: str, leaf: Mapping[str, Any]) -> Any:
    """The value of a tag that `small_leaf` wrote, or of a wrapper. Raises CorruptObject, or StateMismatch."""
    return _unflatten(path, leaf) if "class" in leaf else collector.small_value(path, leaf, _KINDS)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable in place."""
    if not tensor.numel():
        return memoryview(bytearray())
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.dtype in _BUFFER_TYPES:
        return plain.numpy().data.cast("B")  # a third of what two views cost, for each tensor of a state
    return plain.reshape(-1).view(torch.uint8).numpy().data


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in order, in host memory."""
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _header(path: str, tensor: torch.Tensor) -> dict[str, Any]:
    """The tree of a tensor that lies in the tree itself, without its data."""
    return {TAG: "tensor", "dtype": dtype_name(path, tensor), "shape": list(tensor.shape), **_device(tensor)}


def _device(tensor: torch.Tensor) -> dict[str, str]:
    # A restore puts the tensor where its kind of device is now, not on a numbered one.
    return {} if tensor.device.type == "cpu" else {"device": tensor.device.type}


def dtype_name(path: str, tensor: torch.Tensor) -> str:
    """The format's name of a tensor's type. Raises UnsupportedObject for tensors that are not plain elements."""
    if not has_plain_elements(tensor):
        kind = f"{kind_of(tensor)} with layout {tensor.layout} on device {tensor.device}"
        raise UnsupportedObject(
            f"tensor at {path!r} is a {kind}, which has no elements in memory that could be stored",
            "Initialize lazy tensors by a first forward. Keep the dense tensors that others are made of (indices and "
            "values), and make these again after a restore: register_buffer(..., persistent=False) leaves one out",
        )
    return name_of(path, tensor.dtype)


def name_of(path: str, dtype: torch.dtype) -> str:
    """The format's name of a type. Raises UnsupportedObject for one that it does not have."""
    if dtype not in NAMES:
        raise UnsupportedObject(f"tensor at {path!r} has type {dtype}", "Convert it to another type")
    return NAMES[dtype]
