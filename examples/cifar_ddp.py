"""CIFAR-10 with DistributedDataParallel: every rank resumes at its next batch.

    torchrun --nproc-per-node 2 examples/cifar_ddp.py --store file:///tmp/ckpts --data cifar-10-batches-bin

Without the data set, random images of the same shape take its place. `--stop-after N` ends the job after that step, as
a kill would; the same command without it continues.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt


def images(folder: Path) -> TensorDataset:
    """Images (3, 32, 32) and their classes: of the binary version of CIFAR-10 if it is there, else random."""
    files = sorted(folder.glob("data_batch_*.bin"))
    if not files:
        return TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(10, (256,)))
    rows = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
    pixels = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32)).float() / 127.5 - 1
    return TensorDataset(pixels, torch.from_numpy(rows[:, 0]).long())


def network() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(32 * 8 * 8, 10),
    )  # fmt: skip


def train_step(model: nn.Module, optim: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    """One step; the mean loss of all ranks."""
    pixels, classes = batch
    loss = nn.functional.cross_entropy(model(pixels), classes)
    optim.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optim.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main() -> None:
    """Train for some epochs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="file:///tmp/ckpts")
    parser.add_argument("--data", type=Path, default=Path("cifar-10-batches-bin"))
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-after", type=int)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    data = images(args.data)
    model = DistributedDataParallel(network())
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = ckpt.data.resumable(DataLoader(data, batch_size=32, sampler=sampler))

    ckpt.init(args.store, run="cifar")
    restored = ckpt.restore(model, optim, loader=loader)  # on every rank: its own place in the data, its random numbers
    step = restored.step + 1 if restored else 0
    for epoch in range(loader.epoch, args.epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            loss = train_step(model, optim, batch)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss:.6f}", flush=True)
            if step % 3 == 0:
                ckpt.save_async(model, optim, step, loader=loader, metrics={"loss": loss})
            if step == args.stop_after:
                ckpt.close()
                return
            step += 1
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
