"""Reads folders that torch.distributed.checkpoint wrote, without executing code in them or loading whole tensors."""

from __future__ import annotations

import io
import mmap
import pickle  # noqa: TID251 - only for the type of the error that torch raises
import zipfile
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch.serialization import skip_data

from ckpt.dtypes import BY_NAME
from ckpt.foreign.inert import GlobalName, Record, read_records
from ckpt.foreign.parts import ForeignState, Read, file_read
from ckpt.foreign.state import Scattered, to_foreign
from ckpt.foreign.strided import strided_read
from ckpt.foreign.torch_file import first_sentence, refusal
from ckptstore.errors import CkptError, CorruptObject, UnsupportedObject

METADATA = ".metadata"

_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
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
)
_PATHS = [(m, n) for m in ("pathlib", "pathlib._local") for n in ("Path", "PosixPath", "PurePosixPath", "WindowsPath")]
_RECORDS = frozenset([(module, name) for module in _MODULES for name in _CLASSES] + _PATHS)
_PLAIN: dict[GlobalName, Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): int,
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"): int,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): dtype for name, dtype in BY_NAME.items()},
}

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _ChunkMetadata(msgspec.Struct, frozen=True):
    offsets: tuple[_Count, ...]
    sizes: tuple[_Count, ...]


class _StoragePlace(msgspec.Struct, frozen=True):
    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: list[str] | None = None


class _MetadataIndex(msgspec.Struct, frozen=True):
    fqn: str
    offset: tuple[_Count, ...] | None = None


class _TensorMetadata(msgspec.Struct, frozen=True):
    properties: Any
    size: tuple[_Count, ...]
    chunks: list[_ChunkMetadata]


class _Metadata(msgspec.Struct, frozen=True):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    planner_data: dict[str, tuple[str | int, ...]] | None = None


_Key = tuple[str, tuple[int, ...] | None]
"""Name of a tensor or value, and the offsets of a chunk in the tensor."""


def read_dcp(path: Path, item: str) -> ForeignState:
    """The state in a folder. `item` names it unless it is a dict of items.

    Raises UnsupportedObject for objects that need code to be executed or were transformed, CorruptObject for a damaged
    or incomplete folder.
    """
    try:
        metadata = _convert(read_records(path / METADATA, _RECORDS, _PLAIN), _Metadata)
        pairs = [
            (_convert(index, _MetadataIndex), _convert(info, _StoragePlace))
            for index, info in metadata.storage_data.items()
        ]
        folder = _DcpFolder(path, {(index.fqn, index.offset): place for index, place in pairs})
        state = _PathNode()
        for name, described in metadata.state_dict_metadata.items():
            _set(state, (metadata.planner_data or {}).get(name, (name,)), folder.value(name, described))
        nested = _with_lists(state)
    except FileNotFoundError as error:
        raise CorruptObject(f"{path} has no {METADATA}", "Only a finished checkpoint has one") from error
    except (msgspec.ValidationError, _BadMetadata) as error:
        raise CorruptObject(f"{path / METADATA} is malformed: {error}") from error
    return to_foreign(nested, item, str(path))


def _convert(record: Any, kind: Any) -> Any:
    return msgspec.convert(record, kind, from_attributes=True)


@dataclass(frozen=True, slots=True)
class _DcpFolder:
    """The files of a checkpoint, and the places of chunks in them."""

    path: Path
    places: dict[_Key, _StoragePlace]
    _maps: dict[Path, memoryview] = field(default_factory=dict)

    def value(self, name: str, described: Any) -> Any:
        """A tensor to be read later, or a small value."""
        if type(described).__name__ != "TensorStorageMetadata":
            return self._small_value(name)
        tensor: _TensorMetadata = _convert(described, _TensorMetadata)
        dtype = _dtype(tensor.properties)
        if 0 in tensor.size:
            return torch.empty(tensor.size, dtype=dtype)
        boxes = {(*chunk.offsets, *chunk.sizes): chunk for chunk in tensor.chunks if 0 not in chunk.sizes}
        if not boxes:
            raise _BadMetadata(f"{name!r} has no chunks")
        pieces = []
        for box, chunk in boxes.items():
            if {len(chunk.offsets), len(chunk.sizes)} != {len(tensor.size)}:
                raise _BadMetadata(f"a chunk of {name!r} does not have the dimensions of the tensor")
            if any(at + n > end for at, n, end in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
                raise _BadMetadata(f"a chunk of {name!r} exceeds the tensor")
            place = self._place(name, chunk.offsets)
            pieces.append((box, self._read(name, place, dtype, chunk.sizes)))
        return Scattered(dtype, tensor.size, tuple(pieces))

    def _small_value(self, name: str) -> Any:
        place = self._place(name, None)
        data = bytearray(place.length)
        file_read(self.path / place.relative_path, place.offset)(0, memoryview(data))
        what = f"{name!r} of {self.path}"
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise refusal(what, io.BytesIO(data), error) from error
        except Exception as error:  # torch raises almost anything for a damaged file
            raise CorruptObject(f"{what} cannot be read: {first_sentence(error)}") from error

    def _place(self, name: str, offsets: tuple[int, ...] | None) -> _StoragePlace:
        place = self.places.get((name, offsets))
        if place is None:
            raise _BadMetadata(f"it has no place for {name!r}")
        if place.transform_descriptors:
            raise UnsupportedObject(
                f"{name!r} of {self.path} was transformed by {', '.join(place.transform_descriptors)}",
                "Save it without extensions",
            )
        if Path(place.relative_path).name != place.relative_path or place.relative_path == "..":
            raise _BadMetadata(f"{name!r} is outside the folder, at {place.relative_path!r}")
        path = self.path / place.relative_path
        if not path.is_file() or path.stat().st_size < place.offset + place.length:
            raise CorruptObject(f"{path} is missing or truncated", "Copy the folder again, with the files of all ranks")
        return place

    def _read(self, name: str, place: _StoragePlace, dtype: torch.dtype, sizes: tuple[int, ...]) -> Read:
        """Reads the elements of one chunk; its tensor is located in the file at the first read."""
        if prod(sizes) * dtype.itemsize > place.length:
            raise _BadMetadata(f"a chunk of {name!r} is larger than its place in the file")
        find = cache(partial(self._find, place, dtype, sizes))

        def read(start: int, buffer: memoryview) -> None:
            try:
                found = find()
            except CkptError:
                raise
            except Exception as error:  # torch and zipfile raise almost anything for a damaged file
                raise CorruptObject(f"{name!r} of {self.path} cannot be read: {first_sentence(error)}") from error
            found(start, buffer)

        return read

    def _find(self, place: _StoragePlace, dtype: torch.dtype, sizes: tuple[int, ...]) -> Read:
        path = self.path / place.relative_path
        if path not in self._maps:
            with open(path, "rb") as file:
                self._maps[path] = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        window = _Window(self._maps[path][place.offset : place.offset + place.length])
        with skip_data():
            tensor = torch.load(io.BufferedReader(window), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes):
            raise CorruptObject(f"the tensor in {path} at byte {place.offset} does not match the metadata")
        memory = window.memory[_only_record(window) :][: tensor.untyped_storage().nbytes()]
        return strided_read(memory, dtype.itemsize, sizes, tensor.stride(), int(tensor.storage_offset()))


class _BadMetadata(Exception):
    """The metadata contradicts itself; the message names the place."""


def _dtype(properties: Any) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) else None
    if isinstance(state, tuple) and state and isinstance(state[0], torch.dtype):
        return state[0]
    raise _BadMetadata("a tensor has no element type")


def _only_record(window: _Window) -> int:
    """Offset of the bytes of the only storage in a file of torch.save."""
    with zipfile.ZipFile(window) as archive:
        (record,) = (info for info in archive.infolist() if info.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED:
        raise CorruptObject("a tensor is compressed")
    header = window.memory[record.header_offset : record.header_offset + zipfile.sizeFileHeader]  # type: ignore[attr-defined]
    name, extra = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
    return record.header_offset + len(header) + name + extra


class _Window(io.RawIOBase):
    """Part of a mapped file, as a file object."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self.memory)}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self.memory[self._at : self._at + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _PathNode(dict[str | int, Any]):
    """A dict or list on the path of a value, by keys or indices. A dict that is itself a value has another type."""


def _set(state: _PathNode, path: tuple[str | int, ...], value: Any) -> None:
    """Set the value at a path."""
    for step in path[:-1]:
        state = state.setdefault(step, _PathNode())
        if type(state) is not _PathNode:
            raise _BadMetadata(f"the path {path} passes through a value")
    if not path or path[-1] in state:
        raise _BadMetadata(f"two values at {path}")
    state[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Convert nodes with integer keys to lists. The keys may be in any order."""
    if type(value) is not _PathNode:
        return value
    if not any(type(key) is int for key in value):
        return {key: _with_lists(item) for key, item in value.items()}
    if value.keys() != set(range(len(value))):
        raise _BadMetadata("a list has gaps")
    return [_with_lists(value[i]) for i in range(len(value))]
