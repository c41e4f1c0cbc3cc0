"""Several fits in one process, with the callback and with the CheckpointIO: `python -m ...fits_lightning FOLDER`.

Prints a JSON object: what `ckptctl ls` would list after each fit, and which weights the paths name.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptdCheckpoint
from ckpt.integrations.lightning_io import CkptdCheckpointIO
from ckptstore.errors import InvalidRequest
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store

FOLDER = sys.argv[1]
FOUND: dict[str, Any] = {}


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(max_steps: int, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", max_steps=max_steps, max_epochs=-1, logger=False, callbacks=list(callbacks),
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=FOLDER, **options,
    )  # fmt: skip


def fit(one: Trainer, module: Module, **options: Any) -> None:
    one.fit(module, DataLoader(TensorDataset(torch.ones(40, 4)), batch_size=4), **options)


def listed(run: str) -> list[list[Any]]:
    """Step, generation and state of each checkpoint."""
    found = StoreOperator(open_store(FOLDER)).checkpoints(run)
    return sorted([one.step, one.attempt.generation, one.state.value] for one in found)


def by_callback() -> None:
    """A fit to step 4, the same to step 8, from step 4 to 6, from a validation to 8, and another training to step 2."""
    saves = CkptdCheckpoint(FOLDER, "callback", every_n_train_steps=2)
    first, module = trainer(4, saves), Module()
    fit(first, module)
    first.fit_loop.epoch_loop.max_steps = 8
    fit(first, module)
    FOUND["continued"] = listed("callback")
    fit(trainer(6, saves), Module(), ckpt_path="ckptd://callback@4")
    FOUND["resumed"] = listed("callback")
    fit(trainer(2, saves), Module())
    FOUND["other"] = listed("callback")
    try:
        fit(trainer(2, saves, CkptdCheckpoint(FOLDER, "second")), Module())
    except InvalidRequest as error:
        FOUND["two callbacks"] = error.message


def weights(io: CkptdCheckpointIO, path: str) -> list[float]:
    loaded: list[float] = io.load_checkpoint(path)["state_dict"]["net.bias"].tolist()
    return loaded


def by_io() -> None:
    """Two models, each trained to the same steps and saved by one CheckpointIO; then the second goes on."""
    io = CkptdCheckpointIO(FOLDER, "io")
    right: dict[str, bool] = {}
    for name, steps in (("one", 4), ("two", 4)):
        module = Module()
        keeps = ModelCheckpoint(f"{FOLDER}/{name}", every_n_train_steps=2, save_top_k=-1, filename="{step}")
        last = trainer(steps, keeps, plugins=[io])
        fit(last, module)
        last.save_checkpoint(f"{FOLDER}/{name}/last.ckpt")
        right[name] = weights(io, f"{FOLDER}/{name}/step=4.ckpt") == module.net.bias.tolist()
        right[f"{name}, last"] = weights(io, f"{FOLDER}/{name}/last.ckpt") == module.net.bias.tolist()
        FOUND[name] = listed("io")
        io.teardown()
    last.save_checkpoint(f"{FOLDER}/light.ckpt", weights_only=True)
    last.save_checkpoint(f"{FOLDER}/whole.ckpt")
    right["whole"] = "optimizer_states" in io.load_checkpoint(f"{FOLDER}/whole.ckpt")
    io.teardown()
    last.fit_loop.epoch_loop.max_steps = 6
    fit(last, module)
    FOUND["went on"] = listed("io")
    FOUND["right"] = right


def by_paths() -> None:
    """A path that is written again and again; another path, of an earlier process, names one of its checkpoints."""
    io = CkptdCheckpointIO(FOLDER, "paths")
    one, module = trainer(1, plugins=[io], enable_checkpointing=False), Module()
    path = f"{FOLDER}/again/last.ckpt"
    for step in range(1, 5):
        one.fit_loop.epoch_loop.max_steps = step
        fit(one, module)
        one.save_checkpoint(path)
        if step == 2:
            (Path(path).parent / "kept.ckpt").write_bytes(Path(path).read_bytes())
    FOUND["paths"] = [step for step, _, _ in listed("paths")]
    io.remove_checkpoint(f"{FOLDER}/again/kept.ckpt")
    FOUND["removed"] = [step for step, _, _ in listed("paths")]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    by_callback()
    by_io()
    by_paths()
    print(json.dumps(FOUND))


if __name__ == "__main__":
    main()
