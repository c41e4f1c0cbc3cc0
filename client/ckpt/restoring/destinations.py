"""Where the bytes of entries go: into live tensors where they are, or into new ones."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from ckpt.capture.leaves import inline_tensor, small_value, tensor_bytes
from ckpt.dtypes import BY_NAME
from ckptstore.documents import JSON, Content
from ckptstore.errors import CorruptObject, UnsupportedFormat
from ckptstore.trees import TAG, decode_tree


class Destinations:
    """Collects what a restore needs of a checkpoint. Nothing live is touched before `place`."""

    def __init__(self, content: Content) -> None:
        entries = content.entries
        self._shapes = {
            name: (dtype, tuple(shape))
            for name, dtype, shape in zip(entries.name, entries.dtype, entries.shape, strict=True)
        }
        self._targets: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._hosts: dict[str, torch.Tensor] = {}

    @property
    def names(self) -> list[str]:
        """Entries that are needed."""
        return list(self._targets)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of an entry. Raises CorruptObject, or UnsupportedFormat for a type this torch lacks."""
        if name not in self._shapes:
            raise CorruptObject(f"a tree names the entry {name!r}, which the manifest does not have")
        dtype, shape = self._shapes[name]
        if dtype not in BY_NAME:
            raise UnsupportedFormat(f"entry {name!r} has type {dtype}, which this torch does not know", "Upgrade torch")
        return BY_NAME[dtype], shape

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Have the entry placed into `target`, of the same shape; another type is cast."""
        self._targets[name].append(target)

    def new(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor that the entry will be placed into."""
        dtype, shape = self.describe(name)
        target = torch.empty(shape, dtype=dtype, device=device)
        self.fill(name, target)
        return target

    def decode(self, tree: JSON, path: str, device: torch.device | str = "cpu") -> Any:
        """The value of a tree; its tensors are filled by `place`. Those saved from a GPU go to `device`."""

        def unleaf(at: str, leaf: dict[str, Any]) -> Any:
            if leaf[TAG] not in ("tensor", "array"):
                return small_value(at, leaf)
            where = device if "device" in leaf else "cpu"
            tensor = self.new(leaf["name"], where) if "name" in leaf else inline_tensor(at, leaf).to(where)
            return tensor.numpy() if leaf[TAG] == "array" else tensor

        return decode_tree(tree, path, unleaf)

    def buffers(self) -> dict[str, memoryview]:
        """Writable host memory for each entry: the target's own where it can be."""
        for name, targets in self._targets.items():
            dtype, shape = self.describe(name)
            first = targets[0]
            direct = first.device.type == "cpu" and first.dtype == dtype and first.is_contiguous()
            own = direct and not first.is_conj() and not first.is_neg()
            self._hosts[name] = first if own else torch.empty(shape, dtype=dtype)
        return {name: tensor_bytes(host) for name, host in self._hosts.items()}

    @torch.no_grad()
    def place(self) -> None:
        """After the buffers are filled: copy to every target that is not its own buffer."""
        for name, targets in self._targets.items():
            host = self._hosts[name]
            for target in targets:
                if target is not host:
                    target.copy_(host)
        self._hosts.clear()
