"""FSDP2 under Accelerate on CPUs. Accelerate runs it for backends of accelerators: gloo is presented as one."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch._C._distributed_c10d import HashStore


def allow_cpus() -> None:
    """In each rank, before an Accelerator or the arguments of a Trainer are made."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = _gloo


def _gloo(*_: Any, **__: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU
