"""Lightning: a callback saves, and `ckpt_path="last"` resumes in the middle of an epoch.

python examples/train_lightning.py file:///tmp/ckpts 7      # ends after 7 steps
python examples/train_lightning.py file:///tmp/ckpts        # goes on to the end
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt.integrations.lightning import CkptdCheckpoint


class Regression(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
        """Show the loss."""
        print(f"step {self.global_step}  loss {outputs['loss'].item():.6f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main(store: str, max_steps: int = 20) -> None:
    """Train to the last step."""
    seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    saves = CkptdCheckpoint(store, run="lightning", every_n_train_steps=5)
    trainer = Trainer(
        max_steps=max_steps, accelerator="cpu", callbacks=[saves], logger=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regression(), DataLoader(data, batch_size=8, shuffle=True), ckpt_path="last")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
