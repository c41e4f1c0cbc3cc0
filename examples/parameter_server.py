"""A parameter server and its workers: rank 0 keeps the model and the optimizer, the others compute gradients.

    torchrun --nproc-per-node 3 examples/parameter_server.py --store /tmp/ckpts

The server saves the model and the optimizer, alone. The workers save their random state and positions in the data,
among themselves: a group of the job that the server is not in. Both use the same steps. Kill any process, or all of
them, and start again with the same arguments: the job goes on from the newest step that both have saved, and every
later loss equals that of an uninterrupted job, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ckpt import Checkpointer
from ckpt.data import resumable

SERVER = 0


def say(*words: object) -> None:
    """Print a line in one write, so that those of several ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def flat(tensors: Iterator[Tensor]) -> Tensor:
    """All values in one tensor."""
    return torch.cat([one.detach().flatten() for one in tensors])


def serve(checkpointer: Checkpointer, model: nn.Module, step: int | None, last: int, save_every: int) -> None:
    """Send weights, receive the gradients of all workers, step."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.StepLR(optim, 10, 0.9)
    if step is not None:
        checkpointer.restore(model, optim, checkpoint=step, scheduler=sched)
        say("resumed", step)
    for done in range((step or 0) + 1, last + 1):
        weights = flat(model.parameters())
        dist.broadcast(weights, SERVER)
        gradients = torch.zeros_like(weights)
        dist.reduce(gradients, SERVER)
        parts = torch.split(gradients, [p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter) / (dist.get_world_size() - 1)
        optim.step()
        sched.step()
        if done % save_every == 0:
            checkpointer.save_async(model, optim, done, scheduler=sched)
    say("weights", SERVER, float(flat(model.parameters()).sum()).hex())


def work(checkpointer: Checkpointer, model: nn.Module, step: int | None, last: int, save_every: int) -> None:
    """Receive weights, send gradients. A worker keeps no state but its position and its random numbers."""
    data = TensorDataset(torch.randn(96, 8), torch.randn(96, 1))
    rank, workers = dist.get_rank(), dist.get_world_size() - 1
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, workers, rank - 1)
    loader = resumable(DataLoader(data, batch_size=4, sampler=sampler))
    torch.manual_seed(rank)  # other dropout on each worker
    if step is not None:
        checkpointer.restore(checkpoint=step, loader=loader)
    batches = loader.endless()
    for done in range((step or 0) + 1, last + 1):
        weights = torch.empty(sum(p.numel() for p in model.parameters()))
        dist.broadcast(weights, SERVER)
        nn.utils.vector_to_parameters(weights, model.parameters())
        inputs, targets = next(batches)
        loss = nn.functional.mse_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        dist.reduce(flat(iter(gradients)), SERVER)
        say("step", rank, done, float(loss.detach()).hex())
        if done % save_every == 0:
            checkpointer.save_async(None, None, done, loader=loader)


def newest_common(checkpointer: Checkpointer) -> int | None:
    """The newest step that the server and the workers have: each may have saved one more than the other."""
    newest = checkpointer.latest()
    steps: list[int | None] = [None] * dist.get_world_size()
    dist.all_gather_object(steps, newest.step if newest else None)
    return None if None in steps else min(step for step in steps if step is not None)


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model everywhere
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    workers = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank() == SERVER:
        checkpointer, role = Checkpointer(arguments.store, run="server", group="solo"), serve
    else:
        checkpointer, role = Checkpointer(arguments.store, run="workers", group=workers), work
    with checkpointer:
        role(checkpointer, model, newest_common(checkpointer), arguments.steps, arguments.save_every)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
