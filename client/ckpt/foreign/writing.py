"""Writes checkpoints for torch.load(weights_only=True) and torch.distributed.checkpoint."""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_unsafe_globals_in_checkpoint

from ckpt.capture.tensors import inline_tensor, small_value
from ckpt.dtypes import BY_NAME
from ckptstore.errors import CorruptObject, UnsupportedObject
from ckptstore.format.documents import Content
from ckptstore.format.trees import TAG, decode_tree, field_names

Data = Mapping[str, memoryview]
"""Writable row-major bytes by entry name."""

_LEFT_OUT = object()


def require_loadable(content: Content, items: Collection[str]) -> None:
    """Raises UnsupportedObject if torch.load(weights_only=True) would reject the trees `items`."""
    file = io.BytesIO()
    torch.save(build_state(content, items, {}), file)
    file.seek(0)
    if refused := get_unsafe_globals_in_checkpoint(file):
        raise UnsupportedObject(
            f"the state holds {', '.join(sorted(refused))}, which torch.load(weights_only=True) refuses",
            "Export to .safetensors, or export a part with --names",
        )


def write_torch(state: dict[str, Any], path: Path) -> None:
    """Write a nested dict to a file; not yet durable on return. Raises OSError."""
    with open(path, "wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            raise _disk_error(error) from None


def write_dcp(state: dict[str, Any], path: Path) -> None:
    """Write a nested dict to a folder that torch.distributed.checkpoint.load reads; not yet durable on return.

    Keys of dicts become strings, and tied tensors are stored separately. Raises OSError.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            save(state, storage_writer=FileSystemWriter(path, sync_files=False), no_dist=True)
    except (RuntimeError, CheckpointException) as error:
        raise _disk_error(error) from None


def build_state(content: Content, items: Collection[str], data: Data) -> dict[str, Any]:
    """The trees `items` with tensors as leaves. Arrays become tensors, numpy scalars Python numbers, dataclasses and
    named tuples dicts, paths and dates text, and time differences seconds.

    A tensor without `data` is omitted from its dict; in a list or tuple it is None. Tied tensors are one tensor. Raises
    CorruptObject.
    """
    rows = content.entries.rows()
    tensors = {name: _tensor(dtype, shape, data[name]) for name, dtype, shape in rows if name in data}
    known = set(content.entries.name)

    def unleaf(path: str, leaf: dict[str, Any]) -> Any:
        if leaf[TAG] not in ("tensor", "array"):
            value = small_value(path, leaf)
            return value.item() if isinstance(value, np.generic) else value
        if "name" not in leaf:
            return inline_tensor(path, leaf)
        if leaf["name"] not in known:
            raise CorruptObject(f"tree at {path!r} names {leaf['name']!r}, which is not an entry")
        return tensors.get(leaf["name"], _LEFT_OUT)

    return {item: _without_gaps(decode_tree(content.trees[item], item, unleaf)) for item in items}


def _disk_error(error: BaseException) -> BaseException:
    """The OSError behind an error of torch, if there is one.

    On a full disk torch reports an "unexpected pos" and hides the OSError.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError):
            return seen
        if failures := getattr(seen, "failures", None):
            return _disk_error(next(iter(failures.values()))[0])
        seen = seen.__cause__ or seen.__context__
    return error


def _tensor(dtype: str, shape: list[int], data: memoryview) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=BY_NAME[dtype], device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8).view(BY_NAME[dtype]).reshape(shape)


def _without_gaps(value: Any) -> Any:
    if isinstance(value, (Path, date)):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if (names := field_names(value)) is not None:
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        for key in [key for key, item in value.items() if item is _LEFT_OUT]:
            del value[key]
        for key, item in value.items():
            value[key] = _without_gaps(item)
        return value
    if type(value) in (list, tuple):
        return type(value)(_without_gaps(item) for item in value)
    return None if value is _LEFT_OUT else value
