"""Reads folders that Orbax wrote, without executing code in them: tensorstore reads their arrays. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ckpt.foreign.parts import ForeignSlice, ForeignState, box_read
from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import CorruptObject, InvalidRequest, UnsupportedObject
from ckptstore.format.decoding import decode_json
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import TAG
from ckptstore.values import Value

METADATA = "_METADATA"
_CACHE = {"cache_pool": {"total_bytes_limit": 1 << 30}}
"""Pieces of the arrays in memory: without it, each of them would be decoded again for each chunk of ours."""


class _Key(Value):
    key: str


class _Kind(Value):
    value_type: str
    skip_deserialize: bool = False


class _Leaf(Value):
    key_metadata: list[_Key]
    value_metadata: _Kind


class _Tree(Value):
    tree_metadata: dict[str, _Leaf]
    use_ocdbt: bool = True
    use_zarr3: bool = False


def read_orbax(path: Path, item: str) -> ForeignState:
    """The state in the folder of a step, or of one item of it. `item` names the only item, also of a step.

    Leaves have the names of their paths, as `ckpt.integrations.jax` gives them; Python's numbers stay numbers.
    Raises InvalidRequest without the package tensorstore, UnsupportedObject for types that no checkpoint holds,
    CorruptObject for a damaged folder.
    """
    try:
        import tensorstore
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "the arrays of Orbax need the package tensorstore, which is not installed", "pip install tensorstore"
        ) from error
    files, context = sorted([*path.glob(METADATA), *path.glob(f"*/{METADATA}")]), tensorstore.Context(_CACHE)
    foreign = ForeignState()
    for file in files:
        try:
            tree = decode_json(file.read_bytes(), _Tree)
            for leaf in tree.tree_metadata.values():
                keys = [one.key for one in leaf.key_metadata]
                name, kind = ".".join(keys), leaf.value_metadata.value_type
                if leaf.value_metadata.skip_deserialize:  # None, or an empty container
                    continue
                place: dict[str, Any] = {"driver": "file", "path": f"{file.parent.absolute()}/"}
                if tree.use_ocdbt:
                    place = {"driver": "ocdbt", "base": place}
                elif ".." in name.split("/"):
                    raise ValueError(f"{name!r} is outside the folder")
                if kind == "string":
                    foreign.notes.append(f"{name} is left out: a text cannot be imported")
                    continue
                spec = {
                    "driver": "zarr3" if tree.use_zarr3 else "zarr",
                    "kvstore": {**place, "path": f"{place.get('path', '')}{name}/"},
                }
                array = tensorstore.open(spec, read=True, open=True, context=context).result()
                where = (item if len(files) == 1 else file.parent.name, *keys)
                foreign.place(where, _leaf(foreign, "/".join(where), array, kind == "scalar"), file)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise CorruptObject(f"{file.parent} cannot be read: {error}", "Copy it again") from error
    return foreign


def _leaf(foreign: ForeignState, entry: str, array: Any, number: bool) -> JSON:
    if number:
        found: JSON = np.asarray(array).item()
        return found
    dtype, shape = array.dtype.name, tuple(array.shape)
    if dtype not in ITEM_BYTES:
        raise UnsupportedObject(f"{entry!r} has type {dtype}", "Convert it to another type")
    foreign.parts.append(ForeignSlice(Slice.whole(entry, dtype, shape), box_read(array, shape, ITEM_BYTES[dtype])))
    return {TAG: "array", "name": entry}
