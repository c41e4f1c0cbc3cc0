"""Saves by several ranks, beyond a plain one: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckptstore.errors import CkptError
from tests.support.parallel.built import Built, Setup
from tests.support.parallel.layouts import LAYOUTS

RUN = "saving"

_HARMLESS = ("get_", "is_", "supports_", "destroy_", "init_", "record_")
_MEETINGS = ("gather", "decide", "gather_alike", "broadcast", "exchange_group")


def without_collectives(store: str, layout: str) -> dict[str, Any]:
    """Saves after the first one, while whatever makes ranks wait for each other raises. The first is before step 0."""
    built = LAYOUTS[layout].build(Setup())
    model: Any = built.model
    steps = []
    with Checkpointer(store, run=RUN) as checkpointer:
        checkpointer.save(model, built.optim, 0)
        for step in (1, 2, 3):
            built.train_step(step)
            with forbidden():
                handle = checkpointer.save_async(model, built.optim, step)
            steps.append(handle.result(60).step)
    return {"steps": steps, "caught": _caught(built)}


def _caught(built: Built) -> list[bool]:
    """Whether the trap works: for a function, a method of a group, a tensor, and a meeting."""
    group: Any = dist.group.WORLD
    whole = next(p for chunk in built.chunks for p in chunk.parameters())
    attempts: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: group.allreduce([torch.zeros(1)]),
        lambda: whole.full_tensor() if hasattr(whole, "full_tensor") else dist.all_reduce(whole.detach()),
        lambda: World(1).gather(None),
    ]
    return [_raises(attempt) for attempt in attempts]


def _raises(attempt: Callable[[], Any]) -> bool:
    with forbidden():
        try:
            attempt()
        except Met:
            return True
    return False


class Met(Exception):
    """Ranks were about to wait for each other."""


class _NoCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that this thread asks of torch, also those that C++ asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            raise Met(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def forbidden() -> Iterator[None]:
    """Every collective of torch and every meeting of ours raises."""

    def refuse(*_: object, **__: object) -> None:
        raise Met

    names = [name for name in distributed_c10d.__all__ if not name.startswith(_HARMLESS)]
    functions = [name for name in names if type(getattr(distributed_c10d, name)) is FunctionType]
    assert {"all_reduce", "barrier", "all_gather_object", "send", "new_group"} <= set(functions)
    places = [*((distributed_c10d, name) for name in functions), *((World, name) for name in _MEETINGS)]
    places += [(dist, name) for name in functions if hasattr(dist, name)]
    patches = [patch.object(place, name, refuse) for place, name in places]
    for one in patches:
        one.start()
    try:
        with _NoCollective():  # type: ignore[no-untyped-call]
            yield
    finally:
        for one in patches:
            one.stop()


def change_layout(store: str) -> dict[str, Any]:
    """Rank 1 gets a parameter that the others do not know of; later all have it, and prepare."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(3, 3)), {}
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        checkpointer.save(model, None, 1)
        if dist.get_rank() == 1:
            model.append(nn.Linear(3, 3))
        try:
            checkpointer.save_async(model, None, 2).result(60)
        except CkptError as error:
            found = {"code": error.code, "said": str(error)}
        if dist.get_rank() == 0:
            model.append(nn.Linear(3, 3))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        checkpointer.prepare(model, None)
        checkpointer.save(model, None, 3)
        other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        restored = checkpointer.restore(other)
    assert restored is not None
    return found | {"restored": restored.step, "ones": all(bool((p == 1).all()) for p in other.parameters())}


class _Masters(torch.optim.Optimizer):
    """Keeps float32 masters, as training in mixed precision does, and sets the weights to their casts."""

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        """sharded: as the parameters are; otherwise as plain tensors of what lies here."""
        super().__init__(model.parameters(), {})
        for parameter in self.param_groups[0]["params"]:
            weight = parameter.detach() if sharded else parameter.detach().to_local()
            master = weight.float() * 1.001
            weight.copy_(master)
            self.state[parameter] = {"exp_avg": torch.ones_like(master), "master": master}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not used."""


def derive_under_fsdp2(store: str) -> dict[str, Any]:
    """Each rank derives its slices of the weights from its slices of the masters, wherever they are written from."""
    found: dict[str, Any] = {"alike": []}
    for split_replicas in (False, True):
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(torch.bfloat16) for _ in range(2))
        for one in (model, other):
            fully_shard(one, mesh=init_device_mesh("cpu", (2,)))
        optim, other_optim = _Masters(model, sharded=True), _Masters(other, sharded=True)
        with Checkpointer(
            f"{store}/{split_replicas}", run=RUN, dedup_casts=True, split_replicas=split_replicas, writer="thread"
        ) as checkpointer:
            checkpointer.save(model, optim, 1)
            checkpointer.restore(other, other_optim)
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            found["alike"] += [torch.equal(first.to_local(), second.to_local()) for first, second in pairs]  # type: ignore[attr-defined]
            try:
                checkpointer.save_async(model, _Masters(model, sharded=False), 2)
            except CkptError as error:
                found |= {"code": error.code, "said": str(error)}
    return found


def fail_to_describe(store: str) -> dict[str, str]:
    """Rank 1 cannot say what it holds."""
    model = nn.Linear(3, 3)
    if dist.get_rank() == 1:
        model.register_state_dict_pre_hook(_broken)  # type: ignore[no-untyped-call]
    with Checkpointer(store, run=RUN, writer="thread", peer_timeout_s=30) as checkpointer:
        try:
            checkpointer.save_async(model, None, 1)
        except Exception as error:
            return {"said": str(error)}
    return {"said": "saved"}


def _broken(*_: object) -> None:
    raise RuntimeError("a hook of rank 1 fails")


def save_spread(built: Built, step: int, folder: Path) -> None:
    """For the matrix: replicas share the writing."""
    model: Any = built.model
    with Checkpointer(store=str(folder), run="matrix", writer="thread", split_replicas=True) as checkpointer:
        checkpointer.save(model, built.optim, step)
