"""Reads folders that torch.distributed.checkpoint wrote, without executing code in them or loading whole tensors."""

from __future__ import annotations

from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Struct

from ckpt.dtypes import BY_NAME
from ckpt.foreign.archive import PATHS, Storage, StridedTensor, read_archive, size
from ckpt.foreign.inert import (
    MAX_DEPTH,
    Budget,
    Maker,
    Malformed,
    PickleReader,
    Record,
    only,
    ordered_dict,
    record_maker,
)
from ckpt.foreign.parts import ForeignState, Read
from ckpt.foreign.state import Scattered, map_file, read_file, to_foreign
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.decoding import convert
from ckptstore.values import Value

METADATA = ".metadata"

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",  # Megatron keeps the plans of all ranks
    "torch.distributed._shard.sharded_tensor.metadata",
)
_CLASSES = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_StorageInfo",
    "SavePlan",
    "WriteItem",
    "WriteItemType",
    "TensorWriteData",
    "BytesIOWriteData",
)
_BESIDE = ("common.pt", "meta.pt")
"""Files of torch.save that Megatron and Lightning write beside the tensors."""

_NAMES: dict[str, Any] = {
    **{f"{module}.{name}": record_maker(name) for module in _MODULES for name in _CLASSES},
    **{path: record_maker(path) for path in PATHS},
    "torch.Size": Maker(size),
    "torch.serialization._get_layout": only(str, "a text"),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": only(int, "a number"),
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": only(int, "a number"),
    "collections.OrderedDict": Maker(ordered_dict),
    **{f"torch.{name}": dtype for name, dtype in BY_NAME.items()},
}
_MOST = 1 << 31
"""Units of a Budget: a million pieces of tensors."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _ChunkMetadata(Value):
    offsets: tuple[_Count, ...]
    sizes: tuple[_Count, ...]


class _StoragePlace(Value):
    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: list[str] | None = None


class _MetadataIndex(Value):
    """Name of a tensor or value, and the offsets of a chunk in the tensor."""

    fqn: str
    offset: tuple[_Count, ...] | None = None


class _TensorMetadata(Value):
    properties: Any
    size: tuple[_Count, ...]
    chunks: list[_ChunkMetadata]


class _Metadata(Value):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[_MetadataIndex, _StoragePlace]
    planner_data: dict[str, tuple[str | int, ...]] | None = None


def read_dcp(path: Path, item: str) -> ForeignState:
    """The state in a folder. `item` names it unless it is a dict of items.

    Raises UnsupportedObject for objects that need code to be executed or were transformed, CorruptObject for a damaged
    or incomplete folder.
    """
    try:
        budget, described = Budget(str(path), _MOST), path / METADATA
        budget.grant(described.stat().st_size)
        read = PickleReader(described.read_bytes(), str(described), _NAMES, budget).read()
        budget.spend_on(read)
        metadata = convert(read, _Metadata, from_attributes=True)
        folder = _DcpFolder(path, budget, metadata.storage_data)
        state = _PathNode()
        for name, one in metadata.state_dict_metadata.items():
            _set(state, (metadata.planner_data or {}).get(name, (name,)), folder.value(name, one))
        nested = _with_lists(state)
    except FileNotFoundError as error:
        raise CorruptObject(f"{path} has no {METADATA}", "Only a finished checkpoint has one") from error
    except (msgspec.ValidationError, Malformed) as error:
        raise CorruptObject(f"{path / METADATA} is malformed: {error}", "Copy it again") from error
    foreign = to_foreign(nested, item, str(path), budget)
    for file in map(path.joinpath, _BESIDE):
        if file.is_file():
            foreign.add(to_foreign({file.stem: read_file(file, budget)}, item, str(file), budget))
    return foreign


class _DcpFolder(Struct):
    """The files of a checkpoint, and the places of chunks in them."""

    path: Path
    budget: Budget
    places: dict[_MetadataIndex, _StoragePlace]
    maps: dict[Path, memoryview] = {}

    def value(self, name: str, described: Any) -> Any:
        """A tensor to be read later, or a small value."""
        if type(described).__name__ != "TensorStorageMetadata":
            return read_archive(self._memory(name, None)[1], f"{name!r} of {self.path}", self.budget)
        tensor = convert(described, _TensorMetadata, from_attributes=True)
        match tensor.properties:
            case Record(state=(torch.dtype() as dtype, *_)):
                pass
            case _:
                raise Malformed("a tensor has no element type")
        if 0 in tensor.size:
            return StridedTensor(Storage(memoryview(b"")), dtype, tensor.size, (1,) * len(tensor.size))
        boxes = {(*chunk.offsets, *chunk.sizes): chunk for chunk in tensor.chunks if 0 not in chunk.sizes}
        if not boxes:
            raise Malformed(f"{name!r} has no chunks")
        pieces = []
        for box, chunk in boxes.items():
            if {len(chunk.offsets), len(chunk.sizes)} != {len(tensor.size)}:
                raise Malformed(f"a chunk of {name!r} does not have the dimensions of the tensor")
            if any(at + n > end for at, n, end in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
                raise Malformed(f"a chunk of {name!r} exceeds the tensor")
            pieces.append((box, self._read(name, *self._memory(name, chunk.offsets), dtype, chunk.sizes)))
        return Scattered(dtype, tensor.size, tuple(pieces))

    def _memory(self, name: str, offsets: tuple[int, ...] | None) -> tuple[int, memoryview]:
        """The bytes of a value or a chunk, after the place in the file at which they begin."""
        place = self.places.get(_MetadataIndex(name, offsets))
        if place is None:
            raise Malformed(f"it has no place for {name!r}")
        if place.transform_descriptors:
            raise UnsupportedObject(
                f"{name!r} of {self.path} was transformed by {', '.join(place.transform_descriptors)}",
                "Save it without extensions",
            )
        if Path(place.relative_path).name != place.relative_path or place.relative_path == "..":
            raise Malformed(f"{name!r} is outside the folder, at {place.relative_path!r}")
        path = self.path / place.relative_path
        if path not in self.maps and path.is_file():
            self.maps[path] = map_file(path)
        if path not in self.maps or len(self.maps[path]) < place.offset + place.length:
            raise CorruptObject(f"{path} is missing or truncated", "Copy the folder again, with the files of all ranks")
        return place.offset, self.maps[path][place.offset : place.offset + place.length]

    def _read(self, name: str, at: int, memory: memoryview, dtype: torch.dtype, sizes: tuple[int, ...]) -> Read:
        """Reads the elements of one chunk; its tensor is located in the file at the first read."""
        if prod(sizes) * dtype.itemsize > len(memory):
            raise Malformed(f"a chunk of {name!r} is larger than its place in the file")

        @cache
        def find() -> Read:
            what = f"{name!r} of {self.path}"
            try:
                tensor = read_archive(memory, what, Budget(what, _MOST))
                if not isinstance(tensor, StridedTensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
                    raise CorruptObject(f"{what}: the tensor at byte {at} does not match the metadata")
                return tensor.reader()
            except (UnsupportedObject, ValueError) as error:
                raise CorruptObject(f"{what} cannot be read: {error}", "Copy the folder again") from error

        return lambda start, buffer: find()(start, buffer)


class _PathNode(dict[str | int, Any]):
    """A dict or list on the path of a value, by keys or indices. A dict that is itself a value has another type."""


def _set(state: _PathNode, path: tuple[str | int, ...], value: Any) -> None:
    """Set the value at a path."""
    if len(path) > MAX_DEPTH:
        raise Malformed(f"a path has more than {MAX_DEPTH} steps")
    for step in path[:-1]:
        state = state.setdefault(step, _PathNode())
        if type(state) is not _PathNode:
            raise Malformed(f"the path {path} passes through a value")
    if not path or path[-1] in state:
        raise Malformed(f"two values at {path}")
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Convert nodes with integer keys to lists. The keys may be in any order."""
    if type(value) is not _PathNode:
        return value
    if not any(type(key) is int for key in value):
        return {key: _with_lists(item) for key, item in value.items()}
    if value.keys() != set(range(len(value))):
        raise Malformed("a list has gaps")
    return [_with_lists(value[i]) for i in range(len(value))]
