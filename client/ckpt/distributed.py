"""This process among its ranks. A single process is a world of one.

Nothing here is called on the training thread after the first save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ckpt.capture.modules import is_replicated, module_state
from ckptstore.errors import UnsupportedObject

_SAMPLE = 64  # elements of each parameter that are compared


class World:
    """The default process group if there is one."""

    def __init__(self) -> None:
        self._group = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self._group else 0
        self.size: int = dist.get_world_size() if self._group else 1

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank, by rank."""
        if self.size == 1:
            return [value]
        boxes: list[Any] = [None] * self.size
        dist.all_gather_object(boxes, value)
        return boxes

    def signature(self, modules: Mapping[str, nn.Module]) -> str:
        """What must be equal on all ranks if rank 0 is to write for them: names, types, shapes, some values.

        Of what DistributedDataParallel keeps equal, no values are looked at.
        """
        digest = xxhash.xxh3_128()
        if self.size == 1:
            return ""
        for item, module in modules.items():
            for name, value in module_state(module).items():
                if not isinstance(value, torch.Tensor):
                    continue
                digest.update(f"{item}/{name} {value.dtype} {tuple(value.shape)}".encode())
                if not is_replicated(module) and value.numel():
                    sample = value.detach().reshape(-1)[:_SAMPLE].cpu().contiguous()
                    digest.update(sample.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def check_replicated(self, signatures: Sequence[str]) -> None:
        """Raise UnsupportedObject if ranks differ: rank 0's shard would silently lose their state."""
        different = [rank for rank, signature in enumerate(signatures) if signature != signatures[0]]
        if different:
            raise UnsupportedObject(
                f"ranks {different[:8]} hold modules that differ from rank 0's",
                "This version saves replicated models (DistributedDataParallel); give each rank of a "
                "model-parallel job a run of its own, outside the process group",
            )
