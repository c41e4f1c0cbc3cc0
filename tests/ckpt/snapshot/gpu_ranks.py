"""Two ranks that train on one GPU, over gloo: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ckpt import Checkpointer


def replicas_on_one_gpu(store: str) -> list[bool]:
    """For each step, whether its checkpoint is the state at the call."""
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(nn.Linear(512, 512).cuda())
    optim = AdamW(model.parameters(), lr=0.01, fused=True)
    weights = []
    with Checkpointer(store, run="r") as checkpointer:
        checkpointer.prepare(model, optim)
        for step in range(4):
            model(torch.randn(16, 512, device="cuda")).square().mean().backward()
            optim.step()
            optim.zero_grad()
            weights.append(model.module.weight.detach().clone())
            checkpointer.save_async(model, optim, step)
        checkpointer.wait()
        found = [checkpointer.load(step, "model/*weight") for step in range(4)]
    return [
        torch.equal(next(iter(tensors.values())), weight.cpu()) for tensors, weight in zip(found, weights, strict=True)
    ]
