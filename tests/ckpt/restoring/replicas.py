"""Replicas that restore one checkpoint together: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckptstore.errors import CkptError
from ckptstore.reading.source import StoreSource
from tests.ckpt.restoring.receiving import receiving
from tests.ckpt.saver.retained_train import state_digest
from tests.support.parallel.runner import logged
from tests.support.stores import CountingStore

RUN = "replicas"


def replica(seed: int, layers: int = 4) -> nn.Module:
    """17 MB of weights, unless fewer layers are asked for."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))


def save(store: str, steps: list[int]) -> str:
    """Checkpoints of data-parallel ranks, each with a data position; the digest of the last one's state."""
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        for step in steps:
            model = nn.parallel.DistributedDataParallel(replica(step))
            checkpointer.save(model, None, step, position={"rank": dist.get_rank()})
    return state_digest(model.module)


def restore(
    store: str | None, daemon: str | None, replica_reads: Any, layers_of_rank_1: int = 4, peer_timeout_s: float = 60.0
) -> dict[str, Any]:
    """What this rank restored, what it read of the store for that, and what it was warned of."""
    model = replica(0, layers_of_rank_1 if dist.get_rank() == 1 else 4)
    options: dict[str, Any] = {"daemon": daemon, "replica_reads": replica_reads, "peer_timeout_s": peer_timeout_s}
    with logged() as log, Checkpointer(store, run=RUN, writer="thread", **options) as checkpointer:
        counting = _count(checkpointer)
        found: dict[str, Any] = {"log": log}
        try:
            restored = checkpointer.restore(model, position=None)
        except CkptError as error:
            return found | {"error": [error.code, error.message]}
        assert restored is not None
        found["restored"] = [restored.id, restored.values["position"]["rank"]]
        found["skipped"] = restored.skipped
    found["digest"] = state_digest(model)
    found["read"] = counting.all_bytes if counting else None
    return found


def receive(store: str) -> str:
    """The digest of what this rank restored into a device, passed on between ranks."""
    model = replica(0)
    with receiving(), Checkpointer(store, run=RUN, writer="thread", replica_reads="broadcast") as checkpointer:
        checkpointer.restore(model, strict=False)
    return state_digest(model)


def _count(checkpointer: Checkpointer) -> CountingStore | None:
    source = checkpointer._source
    if not isinstance(source, StoreSource):
        return None
    source.store = counting = CountingStore(source.store)
    return counting
