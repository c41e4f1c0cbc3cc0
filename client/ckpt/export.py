"""A checkpoint as a file for `torch.load(weights_only=True)`: the trees as they were saved, tensors and all."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from ckpt.capture.leaves import inline_tensor, small_value
from ckpt.dtypes import BY_NAME
from ckptstore.documents import Content
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.trees import TAG, decode_tree

_LEFT_OUT = object()


def write_torch(content: Content, items: Collection[str], data: Mapping[str, bytearray], path: Path) -> None:
    """Write the trees `items` as one nested dict to `path`; not yet durable on return.

    data: row-major bytes by entry. Raises UnsupportedObject if torch.load(weights_only=True) would not take the
    file, CorruptObject and OSError.
    """
    _save(build_state(content, items, data), path)
    refused = get_unsafe_globals_in_checkpoint(path)
    if refused:
        raise UnsupportedObject(
            f"the state holds {', '.join(sorted(refused))}, which torch.load(weights_only=True) refuses",
            "Export to .safetensors, or only a part with --names",
        )


def build_state(content: Content, items: Collection[str], data: Mapping[str, bytearray]) -> dict[str, Any]:
    """The trees `items`, with tensors in the place of leaves; arrays become tensors, numpy's numbers Python's.

    A tensor that `data` does not hold is left out of its dict; in a list or tuple it is None.
    Tied tensors are one tensor.
    """
    columns = zip(content.entries.name, content.entries.dtype, content.entries.shape, strict=True)
    tensors = {name: _tensor(dtype, shape, data[name]) for name, dtype, shape in columns if name in data}
    known = set(content.entries.name)

    def unleaf(path: str, leaf: dict[str, Any]) -> Any:
        if leaf[TAG] not in ("tensor", "array"):
            value = small_value(path, leaf)
            return value.item() if isinstance(value, np.generic) else value
        if "name" not in leaf:
            return inline_tensor(path, leaf)
        if leaf["name"] not in known:
            raise CorruptObject(f"tree at {path!r} names {leaf['name']!r}, which is no entry")
        return tensors.get(leaf["name"], _LEFT_OUT)

    return {item: _without_gaps(decode_tree(content.trees[item], item, unleaf)) for item in items}


def _save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # On a full disk torch complains of an "unexpected pos"; what the file said is hidden behind that.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _tensor(dtype: str, shape: list[int], data: bytearray) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=BY_NAME[dtype])
    return torch.frombuffer(data, dtype=torch.uint8).view(BY_NAME[dtype]).reshape(shape)


def _without_gaps(value: Any) -> Any:
    if isinstance(value, dict):
        for key in [key for key, item in value.items() if item is _LEFT_OUT]:
            del value[key]
        for key, item in value.items():
            value[key] = _without_gaps(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(_without_gaps(item) for item in value)
    return None if value is _LEFT_OUT else value
