"""RankItems: the items of a state dict that one rank writes, as slices of its shard and values for the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ckpt.capture.parts import has_plain_elements
from ckpt.capture.tensors import small_leaf, tensor_bytes
from ckpt.dcp.naming import Path, Value, entry_name, is_value, path_of
from ckpt.dtypes import NAMES
from ckptstore.errors import UnsupportedObject
from ckptstore.format.documents import JSON
from ckptstore.format.shards import ChunkSpan, Placed, Slice, place_slices, plan_chunks
from ckptstore.format.trees import TAG, encode_tree, unsupported

_Tensors = dict[Slice, Callable[[], torch.Tensor]]


class RankItems(NamedTuple):
    """The items of one rank. Tensors are resolved one after the other, when their bytes are needed."""

    placed: list[Placed]
    results: list[WriteResult]
    """One result per item, with its Value."""
    tensors: _Tensors

    @staticmethod
    def of(plan: SavePlan, planner: SavePlanner) -> RankItems:
        """The items of a plan. Raises UnsupportedObject for objects that cannot be stored without pickle."""
        tensors: _Tensors = {}
        results = []
        for item in plan.items:
            path = path_of(plan.planner_data, item.index.fqn)
            if item.type is WriteItemType.BYTE_IO:
                value = _object(path, _lookup(planner, item, path), tensors)
                size = len(msgspec.json.encode(value.tree))
            else:
                piece = _slice(item, path)
                value, size = Value(path, {TAG: "tensor", "name": piece.entry}), piece.bytes
                # An empty part of a larger tensor is not stored.
                if piece.bytes or 0 in piece.shape:
                    _add(tensors, piece, partial(_tensor, planner, item, piece))
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=value))
        return RankItems(place_slices(tensors), results, tensors)

    def chunks(self) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """The raw bytes of each chunk, in order. Holds at most one tensor and one chunk in addition to those in use."""
        stream = (tensor_bytes(self.tensors[place.slice]()) for place in self.placed if place.slice.bytes)
        left = memoryview(b"")
        for span in plan_chunks(self.placed):
            parts, missing = [], span.bytes
            while missing:
                left = left or next(stream)
                parts.append(left[:missing])
                left, missing = left[missing:], missing - len(parts[-1])
            raw = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            yield raw, span


def _add(tensors: _Tensors, piece: Slice, resolve: Callable[[], torch.Tensor]) -> None:
    if piece in tensors:
        raise UnsupportedObject(
            f"two tensors of the state have the name {piece.entry!r}",
            'Rename a key: a "/" in it reads like a nested dict, and 1 like "1"',
        )
    tensors[piece] = resolve


def _slice(item: WriteItem, path: Path) -> Slice:
    data = item.tensor_data
    assert data is not None
    name = entry_name(path)
    return Slice(name, _type(name, data.properties.dtype), tuple(data.size), (*data.chunk.offsets, *data.chunk.sizes))


def _type(name: str, dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise UnsupportedObject(f"tensor at {name!r} has type {dtype}", "Convert it to another type")
    return NAMES[dtype]


def _tensor(planner: SavePlanner, item: WriteItem, piece: Slice) -> torch.Tensor:
    """The planned part of a tensor, in host memory. Raises UnsupportedObject if it is not what was planned."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    sizes = piece.box[len(piece.shape) :]
    if not has_plain_elements(tensor) or tuple(tensor.shape) != sizes or NAMES.get(tensor.dtype) != piece.dtype:
        raise UnsupportedObject(
            f"tensor at {piece.entry!r} is {tensor.dtype} {list(tensor.shape)} ({tensor.layout}, {tensor.device}), "
            f"planned as {piece.dtype} {list(sizes)}",
            "Store dense tensors; a planner that transforms tensors must plan with the transformed ones",
        )
    return _host(tensor)


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _object(path: Path, value: Any, tensors: _Tensors) -> Value:
    """The object's tree; tensors and arrays in it become separate entries."""

    def leaf(at: str, found: Any) -> JSON:
        if type(found) in (torch.Tensor, torch.nn.Parameter) and has_plain_elements(found):
            kind, tensor = "tensor", found
        elif type(found) is np.ndarray:
            kind, tensor = "array", _from_array(at, found)
        else:
            return small_leaf(at, found)
        _add(tensors, Slice.whole(at, _type(at, tensor.dtype), tuple(tensor.shape)), partial(_host, tensor))
        return {TAG: kind, "name": at}

    name = entry_name(path)
    tree = encode_tree(value, name, leaf)
    if not is_value(tree):
        raise UnsupportedObject(
            f"state at {name!r} is a dict or list that the planner did not flatten",
            "Use a planner with flatten_state_dict=True, the default",
        )
    return Value(path, tree)


def _from_array(path: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise unsupported(path, array) from error


def _lookup(planner: SavePlanner, item: WriteItem, path: Path) -> Any:
    """The object itself. If the planner serializes objects itself: the object loaded from its bytes without pickle."""
    kind = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object  # type: ignore[attr-defined]
    ):
        return planner.lookup_object(item.index)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise UnsupportedObject(
            f"state at {entry_name(path)!r} is serialized by {kind.__qualname__} in a form that needs pickle: {error}",
            "Change the planner to return numbers, strings, lists, dicts or tensors",
        ) from error
