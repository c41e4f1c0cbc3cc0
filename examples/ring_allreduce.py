"""Data parallel training with a ring all-reduce written out in sends and receives, without DistributedDataParallel.

    torchrun --nproc-per-node 3 examples/ring_allreduce.py --store /tmp/ckpts

Kill any process, or all of them, and start again with the same arguments: the job goes on from its newest checkpoint,
and every later loss equals that of an uninterrupted job, bit for bit.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ckpt


def say(*words: object) -> None:
    """Print a line in one write, so that those of several ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def ring_mean(values: Tensor) -> None:
    """Replace a flat tensor by its mean over all ranks. Each rank sends 2 (n - 1) pieces of 1/n to its neighbour."""
    rank, size = dist.get_rank(), dist.get_world_size()
    following, previous = (rank + 1) % size, (rank - 1) % size
    pieces = list(values.tensor_split(size))

    def exchange(out: int, into: int) -> Tensor:
        received = torch.empty_like(pieces[into])
        sending = dist.isend(pieces[out], following)
        dist.recv(received, previous)
        if sending is not None:
            sending.wait()
        return received

    for turn in range(size - 1):  # reduce: in the end this rank has the sum of piece rank + 1
        out, into = (rank - turn) % size, (rank - turn - 1) % size
        pieces[into] += exchange(out, into)
    for turn in range(size - 1):  # gather: pass finished pieces on
        out, into = (rank + 1 - turn) % size, (rank - turn) % size
        pieces[into].copy_(exchange(out, into))
    values /= size


def main() -> None:
    """Train to the last epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same model everywhere
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 10, 0.9)
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data)
    loader = ckpt.data.resumable(DataLoader(data, batch_size=4, sampler=sampler))
    torch.manual_seed(rank)  # other dropout on each rank

    ckpt.init(arguments.store, run="ring")
    restored = ckpt.restore(model, optim, scheduler=sched, loader=loader)
    step = restored.step if restored else 0
    if restored and rank == 0:
        say("resumed", step)
    for epoch in range(loader.epoch, arguments.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            ring_mean(gradients)
            nn.utils.vector_to_parameters(gradients, [p.grad for p in model.parameters() if p.grad is not None])
            optim.step()
            sched.step()
            optim.zero_grad()
            step += 1
            say("step", rank, step, float(loss.detach()).hex())
            if step % arguments.save_every == 0:
                ckpt.save_async(model, optim, step, scheduler=sched, loader=loader)
    ckpt.close()
    say("weights", rank, float(nn.utils.parameters_to_vector(model.parameters()).sum().detach()).hex())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
