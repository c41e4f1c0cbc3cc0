"""Elastic training: torchrun starts the workers again after a failure, on as many processes as there are.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else gloo finds the addresses of the killed workers after a restart
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --store /tmp/ckpts
    torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 examples/elastic.py ...

Kill a worker: torchrun ends the others and starts all of them again, and they go on from the newest checkpoint. On as
many ranks as before, every later loss equals that of an uninterrupted job, bit for bit. On another number of ranks, the
rest of the epoch is divided among them: no sample comes twice and none is left out.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt


def say(*words: object) -> None:
    """Print a line in one write, so that those of several ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train to the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=3)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    say("worker", rank, os.getpid())
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(120), torch.randn(120, 8), torch.randn(120, 1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1)))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 10, 0.9)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = ckpt.data.resumable(DataLoader(data, batch_size=4, sampler=sampler))
    torch.manual_seed(rank)  # other dropout on each rank

    ckpt.init(arguments.store, run="elastic")
    loop = ckpt.epochs(model, optim, arguments.epochs, scheduler=sched, loader=loader, schedule=arguments.save_every)
    if loop.restored and rank == 0:
        say("resumed", loop.step)
    for epoch in loop:
        sampler.set_epoch(epoch)
        for numbers, inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optim.step()
            sched.step()
            optim.zero_grad()
            say("step", rank, loop.step, float(loss.detach()).hex(), epoch, *numbers.tolist())
    ckpt.close()
    say("weights", rank, float(nn.utils.parameters_to_vector(model.parameters()).sum().detach()).hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
