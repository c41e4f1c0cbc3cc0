"""What sharded ranks read of a checkpoint: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import Checkpointer
from ckptstore.reading.source import StoreSource
from tests.support.counting import CountingStore

RUN = "sharded"


def model(seed: int) -> nn.Module:
    """13 MB, 768 wide; the last layer divides by no number of ranks."""
    torch.manual_seed(seed)
    layers = [nn.Linear(768, 768, bias=False) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(768, 1001, bias=False))


def restore(store: str, seed: int, replica_reads: Any) -> dict[str, Any]:
    """Bytes of shards that this rank read, the bytes it holds, and whether they are those of the seed."""
    expected, sharded = model(seed).state_dict(), model(seed + 1)
    fully_shard(sharded)
    with Checkpointer(store, run=RUN, writer="thread", replica_reads=replica_reads) as checkpointer:
        source = checkpointer._source
        assert isinstance(source, StoreSource)
        source.store = counting = CountingStore(source.store)
        checkpointer.restore(sharded)
    held, equal = 0, True
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        held += parameter.to_local().nbytes
        equal &= torch.equal(parameter.full_tensor(), expected[name])
    return {"read": counting.read_bytes, "held": held, "equal": equal}
