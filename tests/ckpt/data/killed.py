"""A training job to be killed: `killed STORE NUM_WORKERS`. Its ranks print each step, its loss and its samples."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import ckpt
from ckpt import Checkpointer
from tests.ckpt.data.trained import Samples
from tests.support.training import seed_all

EPOCHS = 3
SAVE_EVERY = 3


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main(store: str, num_workers: int) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seed_all(rank)
    samples = Samples() if "SAMPLES" not in os.environ else Samples(num_samples=int(os.environ["SAMPLES"]))
    sampler: DistributedSampler[torch.Tensor] | None = None
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    if "SAMPLES" in os.environ or size > 1:  # an epoch of one process may go on among several
        sampler = DistributedSampler(samples, size, rank, seed=3)
    loader = ckpt.data.resumable(
        DataLoader(samples, batch_size=2, shuffle=sampler is None, sampler=sampler, num_workers=num_workers)
    )
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 2, 0.9)
    with Checkpointer(store, run="killed") as checkpointer:
        restored = checkpointer.restore(model, optim, scheduler=sched, loader=loader)
        step = restored.step if restored else 0
        handle: ckpt.SaveHandle | None = None
        if rank == 0 and restored:
            say("resumed", step)
        for epoch in range(loader.epoch, EPOCHS):
            loader.set_epoch(epoch)
            for batch in loader:
                loss = model(batch).square().mean()
                loss.backward()
                optim.step()
                sched.step()
                optim.zero_grad()
                step += 1
                assert handle is None or handle.wait_staged(60)  # a save survives from here on
                ids = ",".join(str(int(number)) for number in batch[:, 0])
                say("step", rank, step, loss.item().hex(), epoch, ids)
                if step % SAVE_EVERY == 0:
                    handle = checkpointer.save_async(model, optim, step, scheduler=sched, loader=loader)
    say("weights", rank, *(value.hex() for p in model.parameters() for value in p.detach().flatten().tolist()))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
