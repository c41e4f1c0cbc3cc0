"""What ranks do in tests of process groups: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from ckpt.ranks import world as ranks_world
from ckpt.restoring import sharing
from ckptstore.errors import CkptError, InvalidRequest, UnsupportedObject
from ckptstore.reading.fetch import fetch_stored


def _trained(seed: int, mesh: Any, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def _values(model: nn.Module) -> dict[str, Any]:
    # A collective of the mesh.
    return {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}


def _problem(checkpointer: Checkpointer, model: nn.Module, position: object = 0) -> str:
    with pytest.raises(UnsupportedObject) as caught:
        checkpointer.prepare(model, None, position=position)
    return caught.value.message


def at_once(store: str) -> dict[str, Any]:
    """Ranks 0 and 2, and ranks 3 and 1, train, save and restore a run each; neither group waits for the other."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    number = dist.get_rank() % 2
    own = DeviceMesh.from_group(groups[number], "cpu")
    model, optim = _trained(number, own)
    with Checkpointer(store, run=f"run-{number}", group=groups[number], writer="thread") as checkpointer:
        schedule = checkpointer.every(seconds=1000)
        for step in range(1, 4 + 2 * number):  # the groups make different calls
            schedule.due(step)
            checkpointer.save(model, optim, step, position=dist.get_rank())
        other, other_optim = _trained(7, own, steps=2)
        restored = checkpointer.restore(other, other_optim, position=None)
        assert restored is not None
        problems = [_problem(checkpointer, nn.Linear(2 + dist.get_rank(), 2))]
        problems.append(_problem(checkpointer, model, object() if dist.get_rank() >= 2 else 0))
    dist.barrier()
    return {
        "problems": problems,
        "asks": checkpointer._is_first(),
        "step": restored.step,
        "equal": _values(model) == _values(other),
        "position": restored.values["position"],
        "world_size": restored.checkpoint.world_size,
    }


def one_replica(store: str, split_replicas: bool) -> dict[str, Any]:
    """Hybrid sharding; the second replica group saves, the first one does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, optim = _trained(3, mesh)
    group = mesh["shard"].get_group()
    options: dict[str, Any] = {"writer": "thread", "split_replicas": split_replicas}
    if dist.get_rank() >= 2:
        with Checkpointer(store, run="replica", group=group, **options) as checkpointer:
            checkpointer.save(model, optim, 1)
    values = _values(model)
    dist.barrier()
    with Checkpointer(store, run="replica", **options) as checkpointer:  # all four restore what the two have saved
        other, other_optim = _trained(9, mesh)
        assert checkpointer.restore(other, other_optim) is not None
    return {"values": values, "restored": _values(other)}


def refused(store: str) -> list[str]:
    """A rank outside of the group, a group that is gone, a group that holds half of the state."""
    found: list[str] = []

    def refuse(error: type[CkptError], group: Any, save: Any = None) -> None:
        try:
            with Checkpointer(store, run="refused", group=group, writer="thread") as checkpointer:
                checkpointer.save(save, None, 1) if save is not None else checkpointer.restore()
        except error as caught:
            found.append(str(caught))

    model, _ = _trained(0, init_device_mesh("cpu", (2,)))
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        refuse(InvalidRequest, first)
    else:
        refuse(UnsupportedObject, first, model)
    both = dist.new_group([0, 1])
    dist.destroy_process_group(both)
    refuse(InvalidRequest, both)
    dist.barrier()
    return found


def wait_in_a_restore(store: str, notice_s: float) -> list[str]:
    """Rank 1 is slow to read its part of a checkpoint; what rank 0 logs while it waits in an exchange of bytes."""
    logged: list[str] = []
    store_of_ranks = dist.distributed_c10d._get_default_store()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            ranks_world.NOTICE_S, ranks_world._HERE_S = usual
            store_of_ranks.set("logged", "")

    def fetch(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            store_of_ranks.wait(["logged"])
        elif not logged:  # on a busy machine ranks may wait for one another in other meetings too
            ranks_world.NOTICE_S, ranks_world._HERE_S = notice_s, notice_s / 2
        return fetch_stored(*arguments)

    logging.getLogger("ckpt.ranks.world").addHandler(Handler())
    usual = ranks_world.NOTICE_S, ranks_world._HERE_S
    setattr(sharing, "fetch_stored", fetch)  # noqa: B010 - the name is the other module's
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    with Checkpointer(store, run="slow", writer="thread", replica_reads="broadcast") as checkpointer:
        checkpointer.save(model, None, 1)
        checkpointer.restore(model)
    dist.barrier()
    return logged
