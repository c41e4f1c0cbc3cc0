"""Training with Accelerate; see proof.py.

Options: break (each epoch is left after seven batches, and saved then), fsdp (FSDP2), sync (of gradients, each batch).
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.accelerate import load_state, save_state
from tests.ckpt.ddp import join
from tests.ckpt.integrations.fsdp2 import allow_cpus
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
SAMPLES = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(5)))


class Counter:
    def __init__(self) -> None:
        self.total, self.epochs = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.epochs = state["total"], state["epochs"]


def main() -> None:
    warnings.simplefilter("ignore")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        join()
    plain, breaks = "plain" in OPTIONS, "break" in OPTIONS
    torch.manual_seed(1 if plain or sys.argv[3] != "0" else 77)
    loading = DataLoaderConfiguration(use_seedable_sampler=breaks, data_seed=3)
    sharding = None
    if "fsdp" in OPTIONS:
        allow_cpus()
        sharding = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=30, cpu_ram_efficient_loading=False
        )
    accelerator = Accelerator(
        cpu=sharding is None, dataloader_config=loading, fsdp_plugin=sharding,
        gradient_accumulation_plugin=GradientAccumulationPlugin(2, sync_each_batch="sync" in OPTIONS),
    )  # fmt: skip
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    optim: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched: Any = torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, total_steps=100)
    loader: Any = DataLoader(SAMPLES, batch_size=4, shuffle=True)
    model, optim, sched, loader = accelerator.prepare(model, optim, sched, loader)
    assert isinstance(model, FSDPModule) == (sharding is not None)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    step = 0
    if not plain:
        ckpt.init(FOLDER, run=RUN)
        restored = load_state(accelerator)
        step = restored.step + 1 if restored else 0
    while (counter.epochs if breaks else loader.iteration) < 3:
        for batch, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                counter.total += accelerator.gather(loss.detach()).mean().item()
                report(step, loss.detach() + counter.total)
                accelerator.backward(loss)
                optim.step()
                sched.step()
                optim.zero_grad()
            if not plain and not breaks and step % 4 == 3:
                save_state(accelerator, step)
            die_after(step)
            step += 1
            if breaks and batch == 6:
                break
        counter.epochs += 1
        if not plain and breaks:
            save_state(accelerator, step - 1)
    if not plain:
        save_state(accelerator, step)
        ckpt.close()
    report_weights(accelerator.get_state_dict(model), FOLDER, RUN)


if __name__ == "__main__":
    main()
