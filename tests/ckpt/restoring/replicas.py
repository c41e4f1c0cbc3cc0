"""Replicas that restore one checkpoint together: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring import fetching, sharing
from ckptstore.errors import CkptError
from ckptstore.reading.source import StoreSource
from tests.ckpt.restoring.receiving import receiving
from tests.support.stores import CountingStore

RUN = "replicas"


def replica(seed: int, layers: int = 6) -> nn.Module:
    """25 MB of weights, unless fewer layers are asked for."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(layers)))


def state_digest(model: nn.Module) -> str:
    digest = xxhash.xxh3_128()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def save(store: str, steps: list[int]) -> str:
    """Checkpoints of data-parallel ranks, each with a data position; the digest of the last one's state."""
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        for step in steps:
            model = nn.parallel.DistributedDataParallel(replica(step))
            checkpointer.save(model, None, step, position={"rank": dist.get_rank()})
    return state_digest(model.module)


def restore(
    store: str | None, daemon: str | None, replica_reads: Any, layers_of_rank_1: int = 6, peer_timeout_s: float = 60.0
) -> dict[str, Any]:
    """What this rank restored, what it read of the store for that, and what it was warned of."""
    model = replica(0, layers_of_rank_1 if dist.get_rank() == 1 else 6)
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


def exchange(store: str, stuck_rank: int | None = None) -> dict[str, Any]:
    """A restore from a store far away, whose bytes pass through the default process group, as with a group of GPUs.

    stuck_rank: fails before the exchange, and sends nothing.
    """
    groups: list[Any] = []
    all_to_all = dist.all_to_all_single

    def count(*args: Any, **options: Any) -> Any:
        groups.append(options.get("group"))
        if dist.get_rank() == stuck_rank:
            raise RuntimeError("this rank is stuck")
        return all_to_all(*args, **options)

    model, found = replica(0), dict[str, Any]()
    timeout_s = 60.0 if stuck_rank is None else 12.0
    with (
        patch.dict(sharing.DEVICE_BACKENDS, {"gloo": "cpu"}),
        patch.object(fetching, "LOCAL_SCHEMES", ("none://",)),
        patch.object(dist, "all_to_all_single", count),
        Checkpointer(store, run=RUN, writer="thread", replica_reads="broadcast", peer_timeout_s=timeout_s) as restoring,
    ):
        counting = _count(restoring)
        try:
            restoring.restore(model, strict=False)
        except CkptError as error:
            found["error"] = [error.code, error.message]
    found |= {"digest": state_digest(model), "read": counting.all_bytes if counting else None}
    return found | {"exchanges": len(groups), "own group": any(group is not None for group in groups)}


def exchange_by_nccl(store: str) -> dict[str, Any]:
    """The same through a group of GPUs, one for each rank: in place of the group of the scenario."""
    rank, size, found = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.distributed_c10d.PrefixStore("nccl", found), rank=rank, world_size=size)
    return exchange(store)


def _count(checkpointer: Checkpointer) -> CountingStore | None:
    source = checkpointer._source
    if not isinstance(source, StoreSource):
        return None
    source.store = counting = CountingStore(source.store)
    return counting


@contextmanager
def logged() -> Iterator[list[str]]:
    """Messages of warnings and errors, as they come."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ckpt").removeHandler(handler)
