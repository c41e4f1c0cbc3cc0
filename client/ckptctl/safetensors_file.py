"""Writing safetensors files from raw bytes. No torch, no numpy types: the package is told where the bytes lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, TensorSpec, serialize_file

from ckptctl.exporting import Selection
from ckptstore.catalog import Checkpoint
from ckptstore.documents import Content
from ckptstore.errors import UnsupportedObject


def write_safetensors(
    checkpoint: Checkpoint, content: Content, selection: Selection, data: Mapping[str, bytearray], path: Path
) -> None:
    """Write the selected entries to `path`; not yet durable on return.

    Raises UnsupportedObject, naming the entry, for an element type that safetensors does not have, and OSError.
    """
    columns = zip(content.entries.name, content.entries.dtype, content.entries.shape, strict=True)
    specs = {name: _spec(name, dtype, shape, data[name]) for name, dtype, shape in columns if name in data}
    aliases = {alias: name for alias, name in content.aliases.items() if name in data}
    try:
        serialize_file(specs, path, {"format": "pt", "checkpoint": checkpoint.id, **aliases})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _spec(name: str, dtype: str, shape: list[int], data: bytearray) -> TensorSpec:
    # The address stays valid as long as the caller holds `data`, which a bytearray never moves unless it is resized.
    address = ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data)) if data else 0
    try:
        return TensorSpec(dtype=dtype, shape=shape, data_ptr=address, data_len=len(data))
    except SafetensorError as error:
        raise UnsupportedObject(
            f"entry {name!r} has type {dtype}, which safetensors does not have",
            "Export to .pt, or leave the entry out with --names",
        ) from error
