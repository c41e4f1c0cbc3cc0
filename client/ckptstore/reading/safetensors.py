"""The safetensors format: a header with names, types and offsets, then the bytes of all tensors. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.decoding import decode_json
from ckptstore.values import Value

TYPES: dict[str, str] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The element types that safetensors supports, by their names in ckpt."""
_DTYPES = {there: here for here, there in TYPES.items()}

METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
_ALIGNMENT = 8

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class StoredTensor(Value):
    """A tensor in a file, with its offset."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int
    """Offset in the file."""

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class _Place(Value):
    dtype: str
    shape: list[_Size]
    data_offsets: tuple[_Size, _Size]


def plan_file(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, tuple[StoredTensor, ...], int]:
    """The header, the tensors with their places, and the length of a file of tensors (name, type, shape). Pure.

    Raises UnsupportedObject for a type the format lacks.
    """
    # Wide elements first, so that all are aligned without padding, which the format forbids.
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BYTES[tensor[1]])
    header: dict[str, object] = {METADATA: dict(metadata)}
    places, at = [], 0
    for name, dtype, shape in ordered:
        if dtype not in TYPES:
            raise UnsupportedObject(
                f"entry {name!r} has type {dtype}, which safetensors does not support",
                "Export to .pt, or leave the entry out with --names",
            )
        places.append(StoredTensor(name, dtype, shape, at))
        end = at + places[-1].bytes
        header[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": (at, end)}
        at = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    begin = _LENGTH_BYTES + len(text)
    moved = tuple(replace(tensor, at=begin + tensor.at) for tensor in places)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, moved, begin + at


def read_header(path: Path) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a file, in file order, and its metadata.

    Raises CorruptObject unless the header's offsets cover the file exactly, UnsupportedObject for an unknown type.
    """
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise CorruptObject(f"{path} is not a safetensors file, or is truncated", "Copy it again")
        header = file.read(length)
    try:
        fields = decode_json(header, dict[str, msgspec.Raw])
        metadata = decode_json(fields.pop(METADATA, b"{}"), dict[str, str])
        places = {name: decode_json(raw, _Place) for name, raw in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptObject(f"{path} has a malformed header: {error}") from error
    found, begin, at = [], _LENGTH_BYTES + length, 0
    for name, place in sorted(places.items(), key=lambda item: item[1].data_offsets):
        if place.dtype not in _DTYPES:
            raise UnsupportedObject(f"tensor {name!r} of {path} has type {place.dtype}", "Convert it to another type")
        tensor = StoredTensor(name, _DTYPES[place.dtype], tuple(place.shape), begin + at)
        if place.data_offsets != (at, at + tensor.bytes):
            raise CorruptObject(f"the offsets of tensor {name!r} of {path} do not match its size")
        at += tensor.bytes
        found.append(tensor)
    if begin + at != size:
        raise CorruptObject(f"{path} holds {size - begin} bytes of tensors, but its header lists {at}", "Copy it again")
    return found, metadata
