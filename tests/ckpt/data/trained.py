"""A training run over a loader, with dropout and a scheduler, to be resumed at any step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import ckpt
from ckpt import Checkpointer
from ckpt.data import ResumableLoader
from tests.support.training import seed_all

MakeLoader = Callable[[], DataLoader[Any]]
NUM_SAMPLES = 22


class Samples(Dataset[torch.Tensor]):
    """Samples that begin with their number, with random noise of every generator; counts what is loaded."""

    def __init__(self, noise: bool = True, num_samples: int = NUM_SAMPLES) -> None:
        self.noise = noise
        self.num_samples = num_samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded.append(index)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))] if self.noise else [0.0] * 3
        return torch.tensor([float(index), *drawn])


class Stream(IterableDataset[torch.Tensor]):
    """The same numbers as a stream; each worker gives its part."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, NUM_SAMPLES, step):
            yield torch.tensor([float(index), 1.0, 2.0, 3.0])


class Run:
    """A model, its optimizer and scheduler, and a loader, made from the same seed."""

    def __init__(self, make: MakeLoader, seed: int = 0) -> None:
        seed_all(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 2, 0.9)
        self.loader: ResumableLoader[Any] = ckpt.data.resumable(make())
        self.seen: list[list[int]] = []

    def step(self, batch: torch.Tensor) -> float:
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optim.step()
        self.sched.step()
        self.optim.zero_grad()
        self.seen.append(batch.reshape(-1, 4)[:, 0].int().tolist())
        return loss.item()

    def train(self, num_epochs: int, after: Callable[[], bool] = lambda: False) -> list[float]:
        """Losses, until `after` a step returns True."""
        losses = []
        for epoch in range(self.loader.epoch, num_epochs):
            self.loader.set_epoch(epoch)
            for batch in self.loader:
                losses.append(self.step(batch))
                if after():
                    return losses
        return losses

    @property
    def extras(self) -> dict[str, Any]:
        return {"scheduler": self.sched, "loader": self.loader}


def interrupted(make: MakeLoader, folder: Path, at: int, num_epochs: int) -> tuple[list[float], list[float], Run, Run]:
    """Losses of a run, and those of one that was saved after step `at` and resumed; and both runs."""
    whole = Run(make)
    losses = whole.train(num_epochs)
    first = Run(make)
    with Checkpointer(str(folder), run="r", writer="thread") as checkpointer:

        def save() -> bool:
            if len(first.seen) == at:
                checkpointer.save(first.model, first.optim, at, **first.extras)
            return len(first.seen) == at

        begun = first.train(num_epochs, save)
    resumed = Run(make, seed=99)
    with Checkpointer(str(folder), run="r", writer="thread") as checkpointer:
        restored = checkpointer.restore(resumed.model, resumed.optim, **resumed.extras)
        assert restored is not None
        seed_all(77)  # what a script draws between the restore and its loop
        begun += resumed.train(num_epochs)
    return losses, begun, whole, resumed
