"""Shared state, and one rank alone, in real ranks: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from ckptstore.errors import UnsupportedObject
from tests.support.parallel.zero import ZeroRedundancyOptimizer


def save_and_restore(store: str) -> list[float]:
    """What this rank gets back."""
    model = nn.Linear(2, 2)
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1, shared={"seen": {"w": torch.arange(2.0)}})
        restored = checkpointer.restore(model, shared={"seen": None})
    assert restored is not None
    found: Any = restored.values["seen"]["w"].tolist()
    return list(found)


def solo(store: str) -> list[Any]:
    """Rank 0 saves and restores alone while the other one waits for it; sharded state is refused."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    found: list[Any] = []
    whole = nn.Linear(4, 4)
    divided = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, lr=0.1)
    if dist.get_rank() == 0:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(store, run="r", writer="thread", group="solo") as checkpointer:
            schedule = checkpointer.every(seconds=1000)
            schedule.due(0)
            checkpointer.save(model, optim, 1, shared={"x": torch.ones(1)})
            restored = checkpointer.restore(model, optim)
            assert restored is not None
            found.append(restored.step)
            with Checkpointer(store, run="sharded", writer="thread", group="solo") as other:
                for unsaved, its_optim in ((sharded, None), (whole, divided)):
                    try:
                        other.save(unsaved, its_optim, 1)
                    except UnsupportedObject as error:
                        found.append(str(error))
    dist.barrier()
    return found
