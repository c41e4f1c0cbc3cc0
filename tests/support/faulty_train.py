"""A small training program that resumes exactly, or with one fault: `faulty_train FAULT STORE`.

An epoch has six batches. It validates after every third batch, and saves after every fourth step: a kill within a save
may leave it or the one before it, and each fault shows after both.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import ckpt
from ckpt import Checkpointer


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Twenty-four samples, with noise from a generator of their own if there is one."""

    def __init__(self, noise: np.random.Generator | None) -> None:
        self.inputs, self.targets, self.noise = torch.randn(24, 4), torch.randn(24, 1), noise

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = self.noise.standard_normal() if self.noise is not None else 0.0
        return self.inputs[number] + noise, self.targets[number]


def leave_out(fault: str, rank: int, extras: dict[str, Any]) -> None:
    """Faults of what is saved and restored."""
    names = {"scheduler": "scheduler", "average": "average", "generator": "noise", "counter": "curriculum"}
    name = "adapters" if fault == "adapter" and rank else "loader" if fault == "loader" else names.get(fault)
    if name is not None:
        del extras[name]


def spoil(fault: str, layers: nn.Sequential, optim: torch.optim.Optimizer) -> None:
    """Faults after the restore."""
    if fault == "moments":
        optim.state.clear()
    if fault == "dummy step":
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
    if fault == "head":
        layers[3].reset_parameters()  # type: ignore[operator]
    if fault == "crash":
        raise RuntimeError("the resumed program does not like this")


def disturb(fault: str, resumed: bool, inputs: torch.Tensor) -> torch.Tensor:
    """Faults with a batch; resumed: with the first one after a restore."""
    if resumed and fault == "seed":
        torch.manual_seed(5)
    if resumed and fault == "draw":
        torch.randn(3)
    return inputs + int.from_bytes(os.urandom(1), "big") / 255 if fault == "clock" else inputs


def main(fault: str, store: str) -> None:
    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 1))
    model: nn.Module = DistributedDataParallel(layers) if dist.is_initialized() else layers
    torch.manual_seed(rank)
    adapter = nn.Linear(4, 4)
    optim = torch.optim.AdamW([*model.parameters(), *adapter.parameters()], lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 3, 0.9)
    average = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    noise = torch.Generator().manual_seed(1)
    curriculum = {"level": 1.0}
    samples = Samples(np.random.default_rng(0) if fault == "noise of the data set" else None)
    torch.manual_seed(5 + rank)
    plain = DataLoader(samples, batch_size=4, shuffle=True)
    loader: Any = plain if fault == "loader" else ckpt.data.resumable(plain)

    extras: dict[str, Any] = {
        "scheduler": sched, "average": average, "loader": loader, "curriculum": curriculum,
        "adapters": nn.ModuleDict({f"of_rank_{rank}": adapter}), "noise": noise.get_state(),
    }  # fmt: skip
    leave_out(fault, rank, extras)
    checkpointer = Checkpointer(store, run="faulty", writer="thread", compress="off")
    restored = None if fault == "no restore" else checkpointer.restore(model, optim, **extras)
    step = restored.step if restored else 0
    if restored:
        curriculum |= restored.values.get("curriculum", {})
        if "noise" in restored.values:
            noise.set_state(restored.values["noise"])
        spoil(fault, layers, optim)
    window = 2 if fault in ("window", "gradients") else 1
    batches = loader.endless() if fault != "loader" else (batch for _ in range(99) for batch in loader)
    while step < 30:
        step += 1
        inputs, targets = next(batches)
        inputs = disturb(fault, restored is not None and step == restored.step + 1, inputs)
        inputs = adapter(inputs + torch.randn(inputs.shape, generator=noise))
        loss = nn.functional.mse_loss(model(inputs), targets) * curriculum["level"]
        loss.backward()  # type: ignore[no-untyped-call]
        if step % window == 0:
            optim.step()
            sched.step()
            average.update_parameters(layers)
            optim.zero_grad()
            curriculum["level"] *= 0.95
        if step % 4 == (3 if fault == "gradients" else 0):
            if "noise" in extras:
                extras["noise"] = noise.get_state()
            checkpointer.save(model, optim, step, metrics={"loss": loss.item()}, **extras)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                model(samples.inputs)
            model.train()
    checkpointer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
