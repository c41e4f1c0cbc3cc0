"""FSDP2 (`fully_shard`): each rank saves and restores its own slices, and the number of ranks may change.

torchrun --nproc-per-node 2 examples/fsdp2.py --store file:///tmp/ckpts --steps 20
torchrun --nproc-per-node 4 examples/fsdp2.py --store file:///tmp/ckpts --steps 40   # continues on four ranks
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt


def main() -> None:
    """Train to the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="file:///tmp/ckpts")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 8)).to(device)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)

    ckpt.init(args.store, run="fsdp2")
    restored = ckpt.restore(model, optim)  # each rank reads only the slices that it holds now
    start = restored.step + 1 if restored else 1
    if dist.get_rank() == 0 and restored:
        print(f"resumed after step {restored.step}", flush=True)
    for step in range(start, args.steps + 1):
        inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(inputs).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if step % 10 == 0:
            ckpt.save_async(model, optim, step)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss.item():.3e}", flush=True)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
