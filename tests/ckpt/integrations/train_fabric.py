"""Training with Lightning Fabric, saved by `ckpt` itself; see proof.py. Option fsdp: `fully_shard`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

import ckpt
from tests.ckpt.ddp import join
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
SAMPLES = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(5)))


def shard(model: Any, mesh: Any) -> Any:
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return model


def strategy(world: int) -> Any:
    if "fsdp" in OPTIONS:
        return ModelParallelStrategy(
            shard, data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
        )
    return DDPStrategy(process_group_backend="gloo") if world > 1 else "auto"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        join()
    plain = "plain" in OPTIONS
    seed = 1 if plain or sys.argv[3] != "0" else 77
    torch.manual_seed(seed)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy(world))
    fabric.launch()
    model: Any = fabric.setup_module(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)))
    optim: Any = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    sampler = DistributedSampler(SAMPLES, world, fabric.global_rank) if world > 1 else RandomSampler(SAMPLES)
    loader: Any = DataLoader(SAMPLES, batch_size=4, sampler=sampler)
    assert isinstance(model.module, FSDPModule) == ("fsdp" in OPTIONS)
    torch.manual_seed(seed + fabric.global_rank)
    step = 0
    if plain:
        loader = fabric.setup_dataloaders(loader)
        epochs: Any = (batch for _ in range(3) for batch in loader)
    else:
        ckpt.init(FOLDER, run=RUN)
        loader = ckpt.data.resumable(loader)
        restored = ckpt.restore(model, optim, loader=loader)
        step = restored.step + 1 if restored else 0
        epochs = loader.endless()
    while step < 3 * len(loader):
        (x,) = next(epochs)
        loss = model(x).square().mean()
        report(step, loss.detach())
        optim.zero_grad()
        fabric.backward(loss)
        optim.step()
        if not plain and step % 4 == 3:
            ckpt.save_async(model, optim, step, loader=loader)
        die_after(step)
        step += 1
    if not plain:
        ckpt.save_async(model, optim, step, loader=loader)
        ckpt.close()
    report_weights(model.state_dict(), FOLDER, RUN)


if __name__ == "__main__":
    main()
