"""torchtitan: its components, with the checkpoint manager of this project, in the order of its Trainer.

pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3; pip install tyro
python examples/train_torchtitan.py file:///tmp/ckpts 7     # ends after 7 steps
python examples/train_torchtitan.py file:///tmp/ckpts       # goes on to the end

In a program of torchtitan itself, only the `checkpoint` of its `Trainer.Config` changes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckpt.integrations.torchtitan import CkptdManager


class Samples(torch.utils.data.IterableDataset[torch.Tensor]):
    """Numbers without end. torchtitan saves the position of data sets that have a state."""

    taken = 0

    def __iter__(self) -> Any:
        while True:
            self.taken += 1
            yield torch.sin(torch.arange(8.0) * self.taken)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.taken = state["taken"]


class Progress:
    """The state that torchtitan's Trainer saves of itself."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        """The number of steps done."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on there."""
        self.step = state["step"]


def main(store: str, steps: int = 20) -> None:
    """Train to the last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    optimizers = OptimizersContainer.Config(param_groups=[group], implementation="foreach").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=5).build(optimizers=optimizers, training_steps=20)
    loader = ParallelAwareDataloader(Samples(), dp_rank=0, dp_world_size=1, batch_size=4)
    progress = Progress()
    manager = CkptdManager.Config(
        enable=True, store=store, run="torchtitan", interval=5, last_save_model_only=False
    ).build(
        dataloader=loader, model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": progress}, sd_adapter=None, base_folder="",
    )  # fmt: skip
    manager.load(step=-1)
    for batch in loader:
        if progress.step == steps:
            break
        optimizers.zero_grad()
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        progress.step += 1
        print(f"step {progress.step}  loss {loss.item():.6f}", flush=True)
        manager.save(progress.step, last_step=progress.step == steps)
    manager.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
