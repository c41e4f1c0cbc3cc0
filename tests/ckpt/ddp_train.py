"""A rank of a data-parallel run: `ddp_train FOLDER STEPS SAVE_AT [MODE]`. Prints the losses as exact floats.

It restores what there is, trains to STEPS, saving at SAVE_AT. MODE: forbid-collectives, different, accumulate, broken.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer
from ckptstore.errors import CkptError
from tests.ckpt.ddp import join
from tests.support.training import seed_all


def main() -> None:
    folder, steps, save_at, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "".join(sys.argv[4:])
    rank = join()
    if mode == "accumulate":
        accumulate(folder, rank)
        dist.destroy_process_group()
        return
    seed_all(5 + (rank if mode == "different" else 0))
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1))
    if mode != "different":
        model = DistributedDataParallel(model)
    if mode == "broken" and rank == 1:
        model.module.register_state_dict_pre_hook(broken)  # type: ignore[union-attr]
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.OneCycleLR(optim, 0.1, total_steps=100)
    seed_all(100 + rank)
    losses = []
    with Checkpointer(folder, run="ddp") as checkpointer:
        restored = checkpointer.restore(model, optim, scheduler=sched, seen=None)
        start = restored.step + 1 if restored else 0
        for step in range(start, steps):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            sched.step()
            losses.append(loss.item())
            if step == save_at:
                checkpointer.save_async(model, optim, step, scheduler=sched, seen=f"rank {rank}")
                if mode == "forbid-collectives":
                    forbid_collectives()
                    checkpointer.save_async(model, optim, step + 1000, scheduler=sched, seen=f"rank {rank}").result(60)
                    break
    print([value.hex() for value in losses])
    print(restored.values["seen"] if restored else "nothing")
    dist.destroy_process_group()


def accumulate(folder: str, rank: int) -> None:
    """Save in the middle of an accumulation window, where gradients differ between ranks, and get them back."""
    seed_all(5)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 4096), nn.Linear(4096, 1)))
    seed_all(100 + rank)
    with model.no_sync():
        model(torch.randn(4, 8)).square().mean().backward()
    before = [parameter.grad for parameter in model.parameters()]
    with Checkpointer(folder, run="ddp") as checkpointer:
        checkpointer.save(model, None, 0, grads=True)
        model.zero_grad(set_to_none=True)
        checkpointer.restore(model)
    after = [parameter.grad for parameter in model.parameters()]
    same = all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(before, after, strict=True))
    print("same gradients" if same else "other gradients")


def broken(*_: object) -> None:
    raise RuntimeError("a hook of rank 1 fails")


def forbid_collectives() -> None:
    """From now on any collective is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective after the first save")

    for name in ("all_gather_object", "broadcast_object_list", "all_gather", "broadcast", "barrier", "all_reduce"):
        setattr(dist, name, refuse)


if __name__ == "__main__":
    try:
        main()
    except CkptError as caught:
        print(f"{caught.code}: {caught}")
        sys.exit(3)
