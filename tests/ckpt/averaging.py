"""A training run with an exponential moving average of its weights, to be killed: `averaging STORE`.

It saves every step and prints its number when save_async has returned.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckpt import Checkpointer

RUN = "averages"


class Training:
    """Deterministic: the state after a step depends on its number alone."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(40, 80), nn.BatchNorm1d(80), nn.Dropout(0.1), nn.Linear(80, 40))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        average: Any = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)

    def step(self) -> None:
        (self.model(torch.randn(16, 40)) - 1).square().mean().backward()
        self.optim.step()
        self.optim.zero_grad()
        self.ema.update_parameters(self.model)

    def state(self) -> list[Any]:
        """Live: of the model, the optimizer and the average."""
        return [self.model.state_dict(), self.optim.state_dict(), self.ema.state_dict()]


def main() -> None:
    training, checkpointer = Training(), Checkpointer(sys.argv[1], run=RUN)
    for step in count():
        training.step()
        checkpointer.save_async(training.model, training.optim, step, ema=training.ema)
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
