"""Ranks with a local tier, for test_tiers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import InvalidRequest
from ckptstore.run import Run
from ckptstore.stores import open_store


def save_and_restore(folder: str, own: bool) -> dict[str, Any]:
    """Save two steps with a state of each rank, and restore the last. own: each rank has a local folder of its own."""
    rank = dist.get_rank()
    local, remote = Path(folder) / (f"local-{rank}" if own else "local"), Path(folder) / f"remote-{own}"
    model = nn.ParameterDict({f"part-{rank}": torch.zeros(1000)})
    steps: list[int] = []
    with Checkpointer(str(remote), run="gpt", local=str(local), retry_s=5.0) as checkpointer:
        for step in (1, 2):
            with torch.no_grad():
                model[f"part-{rank}"].fill_(step + rank)
            try:
                steps.append(checkpointer.save(model, None, step).step)
            except InvalidRequest as error:
                return {"error": error.message}
    dist.barrier()
    with Checkpointer(str(remote), run="gpt", local=str(local)) as checkpointer:
        restored = checkpointer.restore(model)
        assert restored is not None
        assert torch.equal(model[f"part-{rank}"], torch.full((1000,), 2.0 + rank))
    listed = list_checkpoints(Run(open_store(str(remote)), "gpt"))
    return {"steps": steps, "remote": [c.step for c in listed], "local_only": restored.read["store"] == 0}
