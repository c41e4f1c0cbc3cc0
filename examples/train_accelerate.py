"""Accelerate: two functions in the place of `accelerator.save_state` and `load_state`.

python examples/train_accelerate.py file:///tmp/ckpts 7      # ends after 7 steps
python examples/train_accelerate.py file:///tmp/ckpts        # goes on to the end
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.integrations.accelerate import load_state, save_state


def main(store: str, max_steps: int = 12) -> None:
    """Train to the last step."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    accelerator = Accelerator(cpu=True)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optim, loader = accelerator.prepare(model, optim, DataLoader(data, batch_size=8, shuffle=True))

    ckpt.init(store, run="accelerate")
    restored = load_state(accelerator)
    step, first_epoch = (restored.step + 1, loader.iteration) if restored else (1, 0)
    for _ in range(first_epoch, 100):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optim.step()
            optim.zero_grad()
            print(f"step {step}  loss {loss.item():.6f}")
            if step % 3 == 0:
                save_state(accelerator, step)
            if step == max_steps:
                ckpt.close()
                return
            step += 1


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
