"""Training with torchtitan's components in the order of its Trainer; see proof.py. Options: keep=K."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckpt.integrations.torchtitan import CkptdManager
from tests.ckpt.ddp import join
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
STEPS = 20


class Samples(IterableDataset[torch.Tensor]):
    """Shuffled numbers without end, as torchtitan's data sets: each with a state."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch, self.taken = rank, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            order = list(range(28))
            random.Random(f"{self.rank} {self.epoch}").shuffle(order)
            while self.taken < len(order):
                self.taken += 1
                yield torch.full((8,), order[self.taken - 1] / 28)
            self.epoch, self.taken = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class Trainer:
    """The state that torchtitan's Trainer saves of itself."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    seed = 1 if "plain" in OPTIONS or sys.argv[3] != "0" else 77
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.3), nn.Linear(6, 1))
    if world > 1:
        join()
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    torch.manual_seed(seed + rank)
    trainer = Trainer()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=optimizers, training_steps=STEPS)
    loader = ParallelAwareDataloader(Samples(rank), dp_rank=rank, dp_world_size=world, batch_size=4)
    keep = next((int(one[5:]) for one in OPTIONS if one.startswith("keep=")), 0)
    config = CkptdManager.Config(
        enable="plain" not in OPTIONS, store=FOLDER, run=RUN, interval=3, keep_latest_k=keep, last_save_model_only=False
    )
    manager = config.build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": trainer}, sd_adapter=None, base_folder=FOLDER,
    )  # fmt: skip
    manager.load(step=-1)
    batches = iter(loader)
    while trainer.step < STEPS:
        die_after(trainer.step)
        optimizers.zero_grad()
        batch = next(batches)
        trainer.ntokens_seen += batch.numel()
        loss = model(batch).square().mean()
        loss.backward()
        report(trainer.step, loss.detach())
        trainer.step += 1
        manager.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        manager.save(trainer.step, last_step=trainer.step == STEPS)
        manager.maybe_wait_for_saving() if "wait" in OPTIONS else None
    manager.close()
    report_weights(ModelWrapper(model).state_dict(), FOLDER, RUN)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
