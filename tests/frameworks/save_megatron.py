"""Saves a state with Megatron's own `torch_dist` on CPUs. Argument: the folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch


def main(folder: Path) -> None:
    # It synchronizes CUDA, and exchanges one number on its device.
    vars(torch.cuda).update(synchronize=lambda *_: None, current_device=lambda: "cpu")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    meeting = (folder.parent / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    tensor: Any = ShardedTensor.from_rank_offsets("decoder.weight", torch.arange(12.0).reshape(3, 4))
    state = {
        "model": {"weight": tensor, "extra": ShardedObject("decoder._extra_state", {"scale": 2.0}, (1,), (0,))},
        "args": argparse.Namespace(lr=0.1, params_dtype=torch.bfloat16, data_path=["a", "b"]),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "opt_param_scheduler": {"num_steps": 7},
    }
    folder.mkdir()
    dist_checkpointing.save(state, str(folder))


if __name__ == "__main__":  # it starts a process of its own
    main(Path(sys.argv[1]))
