"""A job that saves new data again and again: `wire STORE RUN SETTINGS BYTES`.

Ranks print "sent RANK SAVE BYTES STORED": what their host sent during a save, and what the save stored.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

from ckpt import Checkpointer
from tests.ckpt.data.killed import say
from tests.hosts.probes import sent


def main(store: str, run: str, settings: dict[str, Any], num_bytes: int) -> None:
    dist.init_process_group("gloo")
    model = torch.nn.Linear(1024, num_bytes // 4096, bias=False)
    with Checkpointer(store, run=run, **settings) as checkpointer:
        step = 0
        while True:
            torch.manual_seed(step)
            model.weight.data.normal_()
            dist.barrier()
            before = sent()
            stored = checkpointer.save(model, None, step).stored_bytes
            dist.barrier()
            say("sent", dist.get_rank(), step, sent() - before, stored)
            step += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
