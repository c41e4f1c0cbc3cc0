"""Two ranks of which one's uploads stand still: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

import time
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.saving import writers
from ckptstore.errors import SaveSkipped
from tests.support.gates import Gate, gated
from tests.support.saving_ranks import RUN
from tests.support.trainers import until


def rank_one_is_busy(store: str, on_busy: Literal["skip", "supersede"]) -> dict[str, Any]:
    """Step 2 hangs in rank 1's upload, step 3 waits behind it, and 4 and 5 find no slot."""
    rank, gate = dist.get_rank(), Gate()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with (
        patch.object(writers, "open_store", gated(gate)),
        Checkpointer(
            store, run=RUN, writer="thread", slots=2 if rank else 8, on_busy=on_busy, commit_timeout_s=300
        ) as checkpointer,
    ):
        checkpointer.save(model, None, 1)
        if rank == 1:
            gate.close()
        handles = {}
        for step in (2, 3, 4, 5):
            nn.init.constant_(model.get_parameter(f"stage{rank}.weight"), step)
            handles[step] = checkpointer.save_async(model, None, step)
            if rank == 1:
                until(lambda: gate.waiting == 1)
        began = time.monotonic()
        gate.open()
        committed, skipped = [1], {}
        for step, handle in handles.items():
            try:
                committed.append(handle.result(60).step)
            except SaveSkipped as error:
                skipped[str(step)] = str(error)
    return {"committed": committed, "skipped": skipped, "took_s": time.monotonic() - began}
