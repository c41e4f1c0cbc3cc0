"""A pipeline of two stages: each rank holds other layers, and one checkpoint holds the whole model.

    torchrun --nproc-per-node 2 examples/pipeline.py --store file:///tmp/ckpts

Stages keep the names that their layers have in the whole model, so the checkpoint restores into any other split. Data
and losses depend on the step alone.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt


class Stage(nn.Module):
    """Layers `first` to `last` of the model, under their names in it."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): nn.Linear(16, 16) for number in range(first, last)})

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 16) to the same."""
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def train_step(stage: Stage, optim: torch.optim.Optimizer, step: int) -> float:
    """One step of both stages: activations go forward, their gradients back. The loss is the last stage's."""
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = torch.zeros(())
    if dist.get_rank() == 0:
        sent = stage(inputs)
        dist.send(sent.detach(), 1)
        gradient = torch.empty(8, 16)
        dist.recv(gradient, 1)
        sent.backward(gradient)
    else:
        received = torch.empty(8, 16)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = stage(received).square().mean()
        loss.backward()
        assert received.grad is not None
        dist.send(received.grad, 0)
    optim.step()
    optim.zero_grad()
    return loss.item()


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="file:///tmp/ckpts")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    stage = Stage(2 * rank, 2 * rank + 2)
    optim = torch.optim.AdamW(stage.parameters(), lr=0.01)

    ckpt.init(args.store, run="pipeline")
    restored = ckpt.restore(stage, optim)
    for step in range(restored.step + 1 if restored else 1, args.steps + 1):
        loss = train_step(stage, optim, step)
        if step % 10 == 0:
            ckpt.save_async(stage, optim, step)
            if rank == 1:
                print(f"step {step}  loss {loss:.3e}", flush=True)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
