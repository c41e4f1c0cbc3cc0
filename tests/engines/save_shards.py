"""Saves a model of transformers, sharded by FSDP2, from one of several ranks.

python -m tests.engines.save_shards FOLDER STORE RUN
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import ckpt


def main(folder: str, store: str, run: str) -> None:
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder)
    fully_shard(model)
    with ckpt.Checkpointer(store, run=run, compress="fast") as checkpointer:
        checkpointer.save(model, None, 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
