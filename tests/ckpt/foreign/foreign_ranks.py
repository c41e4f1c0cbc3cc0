"""A rank that saves with torch.distributed.checkpoint's own writer: `foreign_ranks FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests.ckpt.dcp_state import flat_optimizer_state, make_model, make_optimizer
from tests.ckpt.ddp import join

dcp: Any = torch.distributed.checkpoint  # it exports without saying so


def main() -> None:
    """The same state under FSDP2, with the optimizer as a tree and with flat keys."""
    folder = Path(sys.argv[1])
    join()
    model = make_model(1)
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer)
    optim, more = make_optimizer(model), {"step": 5, "history": [0.5, {"loss": 0.25}]}
    weights = get_model_state_dict(model)
    dcp.save(
        {"model": weights, "optimizer": get_optimizer_state_dict(model, optim), **more}, checkpoint_id=folder / "tree"
    )
    dcp.save({"model": weights, "optim": flat_optimizer_state(model, optim), **more}, checkpoint_id=folder / "flat")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
