"""ItemLoader: the items of one rank's load plan, the reads they need, and the buffers they are read into."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from ckpt.capture.tensors import inline_tensor, small_value, tensor_bytes
from ckpt.dcp.naming import Value
from ckpt.dtypes import BY_NAME
from ckptstore.errors import CorruptObject
from ckptstore.format.boxes import Box
from ckptstore.format.documents import Content
from ckptstore.format.overlaps import Want
from ckptstore.format.trees import TAG, decode_tree


class ItemLoader:
    """Collects the reads of one rank. Used by one thread. Call `place` once `buffers` are filled."""

    def __init__(self, content: Content) -> None:
        entries = content.entries
        columns = zip(entries.name, entries.dtype, entries.shape, strict=True)
        self._entries = {name: (dtype, tuple(shape)) for name, dtype, shape in columns}
        self._finish: list[Callable[[], None]] = []
        self.wants: list[Want] = []
        self.buffers: dict[str, memoryview] = {}
        """Writable host memory for each want; the memory of the target tensor itself if possible."""

    def add_tensor(self, planner: LoadPlanner, item: ReadItem, value: Value) -> None:
        """Read part of an entry into the tensor that the planner resolves."""
        assert value.entry is not None
        dtype = self._describe(value.entry)[0]
        target = planner.resolve_tensor(item).detach()
        # The metadata declares each entry as one chunk, so offsets in storage are offsets in the entry.
        box = (*item.storage_offsets, *item.lengths)
        own = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        direct = own and not target.is_conj() and not target.is_neg()
        host = target if direct else torch.empty(item.lengths, dtype=dtype, device="cpu")
        self._want(value.entry, box, host)
        self._finish.append(partial(_place_tensor, planner, item, host, target))

    def add_object(self, planner: LoadPlanner, item: ReadItem, value: Value) -> None:
        """Build an object from its tree."""
        decoded = decode_tree(value.tree, value.name, self._unleaf)
        self._finish.append(partial(_place_object, planner, item, decoded))

    def place(self) -> None:
        """Pass all tensors and objects to the planner."""
        for step in self._finish:
            step()

    def _unleaf(self, path: str, leaf: dict[str, Any]) -> Any:
        if leaf[TAG] not in ("tensor", "array"):
            return small_value(path, leaf)
        tensor = self._new(leaf["name"]) if "name" in leaf else inline_tensor(path, leaf)
        return tensor.numpy() if leaf[TAG] == "array" else tensor

    def _new(self, entry: str) -> torch.Tensor:
        dtype, shape = self._describe(entry)
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._want(entry, None, tensor)
        return tensor

    def _want(self, entry: str, box: Box | None, host: torch.Tensor) -> None:
        buffer = str(len(self.wants))
        self.wants.append(Want(entry, box, buffer))
        self.buffers[buffer] = tensor_bytes(host)

    def _describe(self, entry: str) -> tuple[torch.dtype, tuple[int, ...]]:
        if entry not in self._entries:
            raise CorruptObject(f"a tree names the entry {entry!r}, which the manifest does not have")
        dtype, shape = self._entries[entry]
        return BY_NAME[dtype], shape


@torch.no_grad()
def _place_tensor(planner: LoadPlanner, item: ReadItem, host: torch.Tensor, target: torch.Tensor) -> None:
    if target is not host:
        target.copy_(host)
    planner.commit_tensor(item, target)


def _place_object(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    # Planners unpickle these bytes. They are made here: bytes from the store are never unpickled.
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)
