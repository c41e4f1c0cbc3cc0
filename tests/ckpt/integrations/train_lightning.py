"""Training with Lightning; see proof.py.

Options: val (validation twice per epoch), top=N (of these), every=N, auto (saves by their cost), windows (of three
batches), ddp, fully_shard, io, term (SIGTERM in step 8), several (loaders: one that is shorter, one of another kind).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptdCheckpoint
from ckpt.integrations.lightning_io import CkptdCheckpointIO
from tests.ckpt.ddp import join
from tests.ckpt.integrations.proof import die_after, report, report_weights

FOLDER, RUN, OPTIONS = sys.argv[1], sys.argv[2], sys.argv[4:]
SAMPLES = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(5)))


class Own:
    """Ten batches per epoch, with random numbers, and a position."""

    def __init__(self) -> None:
        self.epoch = self.at = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < 10:
            self.at += 1
            yield torch.full((1, 4), self.epoch + self.at / 10) + torch.rand(())
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


def training_data() -> Any:
    loader = DataLoader(SAMPLES, batch_size=4, shuffle=True)
    if "several" not in OPTIONS:
        return loader
    return {"long": loader, "short": DataLoader(SAMPLES, batch_size=10, shuffle=True), "own": Own()}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8, "activation": nn.Tanh()})
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def configure_model(self) -> None:
        if "fully_shard" in OPTIONS and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = [torch.cat([batch["long"][0], batch["short"][0], batch["own"]])]
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        report(self.trainer.fit_loop.total_batch_idx, loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if "term" in OPTIONS and self.global_step == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        die_after(self.trainer.fit_loop.total_batch_idx + 1)

    def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
        self.log("val", self.net(batch[0]).square().mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.01)
        sched = torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, total_steps=100)
        return [optim], [{"scheduler": sched, "interval": "step"}]


def callbacks() -> list[Callback]:
    if "plain" in OPTIONS:
        return []
    every = next((int(one[6:]) for one in OPTIONS if one.startswith("every=")), None)
    monitor = "val" if "val" in OPTIONS else None
    top = next((int(one[4:]) for one in OPTIONS if one.startswith("top=")), 2 if monitor else -1)
    steps = None if "auto" in OPTIONS else every or 1000
    saves = CkptdCheckpoint(FOLDER, RUN, every_n_train_steps=steps, monitor=monitor, save_top_k=top)
    # It looks for the metric at the end of an epoch, also of one that was saved after its last validation.
    return [saves, *([EarlyStopping("val", patience=99, check_on_train_epoch_end=True)] if monitor else [])]


def strategy(world: int) -> Any:
    if world == 1:
        return "auto"
    if "fully_shard" in OPTIONS:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return DDPStrategy(process_group_backend="gloo")


def save_by_io(module: Module, world: int) -> None:
    """Save with Lightning's ModelCheckpoint at every fourth step, to step 12, or again from there to 14."""
    io = CkptdCheckpointIO(FOLDER, RUN)
    keeps = ModelCheckpoint(
        f"{FOLDER}/paths", every_n_train_steps=4, save_top_k=2, monitor="step", mode="max", save_last=True
    )
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(world), max_steps=14 if "again" in OPTIONS else 12,
        logger=False, callbacks=[keeps], plugins=[io], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=FOLDER,
    )  # fmt: skip
    trainer.fit(module, DataLoader(SAMPLES, batch_size=2, shuffle=True), ckpt_path="last")
    path = f"{FOLDER}/paths/end.ckpt"
    if "again" in OPTIONS:
        trainer.save_checkpoint(path)
    report_weights(module.state_dict(), FOLDER, RUN)
    if "again" in OPTIONS and trainer.is_global_zero:
        loaded = io.load_checkpoint(path)
        torch.save(
            {name: loaded[name] for name in ("global_step", "state_dict", "optimizer_states")}, f"{FOLDER}/loaded.pt"
        )
        torch.save({"text": "a file of Lightning's own"}, f"{FOLDER}/foreign.ckpt")
        (Path(FOLDER) / "foreign").write_text(io.load_checkpoint(f"{FOLDER}/foreign.ckpt")["text"])


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        join()
    seed_everything(1, verbose=False)  # also the seed of Lightning's DistributedSampler
    if not {"plain", "term"} & set(OPTIONS) and sys.argv[3] == "0":
        torch.manual_seed(77)
    module = Module()
    if "io" in OPTIONS:
        save_by_io(module, world)
        return
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy(world), max_epochs=3, logger=False, callbacks=callbacks(),
        enable_checkpointing="plain" not in OPTIONS, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=None if "val" in OPTIONS else 0, val_check_interval=0.5 if "val" in OPTIONS else None,
        default_root_dir=FOLDER, accumulate_grad_batches=3 if "windows" in OPTIONS else 1,
    )  # fmt: skip
    trainer.fit(
        module, training_data(), DataLoader(SAMPLES, batch_size=8), ckpt_path=None if "plain" in OPTIONS else "last"
    )
    report_weights(trainer.strategy.lightning_module_state_dict(), FOLDER, RUN)
    if "val" in OPTIONS and "plain" not in OPTIONS:
        trainer.validate(module, DataLoader(SAMPLES, batch_size=8), "best", verbose=False)
        torch.save({"path": trainer.ckpt_path, **module.state_dict()}, Path(FOLDER) / "best.pt")


if __name__ == "__main__":
    main()
