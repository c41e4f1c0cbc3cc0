"""A parameter server that applies gradients as they come: the order is another one in every run.

    torchrun --nproc-per-node 3 examples/async_parameter_server.py --store /tmp/ckpts

No run repeats another one bit for bit, so a resume has its own definition here. The server goes on with the weights,
the optimizer and the number of gradients it has applied of each worker, all of one moment. Each worker goes on with its
next batch on the weights of that moment; a gradient that was under way when the job was killed is computed again. Thus
every batch of a worker is applied once, in order, whenever the job was killed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ckpt import Checkpointer

SERVER = 0
STOP = torch.tensor([float("nan")])


def say(*words: object) -> None:
    """Print a line in one write, so that those of several ranks do not mix."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def flat(model: nn.Module) -> Tensor:
    """All weights in one tensor."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def digest(model: nn.Module) -> str:
    """Equal for equal weights."""
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()[:16]


def serve(checkpointer: Checkpointer, model: nn.Module, last: int, save_every: int) -> None:
    """Apply the next gradient that comes, and answer with the weights."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    applied = [0] * dist.get_world_size()
    restored = checkpointer.restore(model, optim, shared={"applied": None})
    if restored is not None:
        applied = restored.values["applied"]
        say("resumed", restored.step, digest(model))
    dist.broadcast(torch.tensor(applied), SERVER)
    dist.broadcast(flat(model), SERVER)
    while sum(applied) < last:
        gradients = torch.empty_like(flat(model))
        worker = dist.recv(gradients)
        parts = torch.split(gradients, [p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optim.step()
        applied[worker] += 1
        say("update", sum(applied), worker, applied[worker], digest(model))
        if sum(applied) % save_every == 0:
            checkpointer.save_async(model, optim, sum(applied), shared={"applied": applied})
        dist.send(flat(model), worker)
    for _ in range(dist.get_world_size() - 1):  # what is under way is not applied
        gradients = torch.empty_like(flat(model))
        dist.send(STOP.expand_as(gradients).clone(), dist.recv(gradients))


def work(model: nn.Module) -> None:
    """Send gradients, receive weights. The number of a batch gives its samples and its random numbers."""
    rank = dist.get_rank()
    inputs, targets = torch.randn(96, 8), torch.randn(96, 1)
    applied = torch.empty(dist.get_world_size(), dtype=torch.int64)
    dist.broadcast(applied, SERVER)
    weights = flat(model)
    dist.broadcast(weights, SERVER)
    number = int(applied[rank])
    while not weights.isnan().any():
        nn.utils.vector_to_parameters(weights, model.parameters())
        torch.manual_seed(1000 * rank + number)
        batch = torch.randint(len(inputs), (4,))
        loss = nn.functional.mse_loss(model(inputs[batch]), targets[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        dist.send(torch.cat([one.flatten() for one in gradients]), SERVER)
        weights = torch.empty_like(weights)
        dist.recv(weights, SERVER)
        number += 1


def main() -> None:
    """Train until so many gradients are applied."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same model and data everywhere
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    if dist.get_rank() == SERVER:
        with Checkpointer(arguments.store, run="async-server", group="solo") as checkpointer:
            serve(checkpointer, model, arguments.updates, arguments.save_every)
    else:
        work(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
