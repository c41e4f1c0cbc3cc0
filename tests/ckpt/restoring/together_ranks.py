"""Meetings of a restore: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckpt.restoring.pipeline import Together
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.errors import CkptError, CorruptObject, NoCheckpoint, StateMismatch
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import open_store


def save(store: str) -> None:
    """Tensors of each rank."""
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(None, None, 1, own={"tensor": torch.full((3,), 7.0)})


def restore(store: str, replica_reads: Any) -> dict[str, Any]:
    """The meetings of a restore, and what it found."""
    meetings: list[str] = []

    def counted(name: str) -> Any:
        method = getattr(World, name)

        def count(self: World, *arguments: Any) -> Any:
            meetings.append(name)
            return method(self, *arguments)

        return patch.object(World, name, count)

    live = {"tensor": torch.zeros(3)}
    checkpointer = Checkpointer(store, run="r", writer="thread", replica_reads=replica_reads)
    with checkpointer, counted("decide"), counted("broadcast"):
        restored = checkpointer.restore(own=live)
    assert restored is not None
    return {"meetings": meetings, "values": live["tensor"].tolist()}


def restore_deleted(store: str, replica_reads: Any) -> dict[str, str]:
    """What a restore raises if its checkpoint is deleted once rank 0 has chosen it."""
    save(store)
    method, run = World.decide, Run(open_store(store), "r")

    def decide(self: World, value: Any, choose: Callable[[list[Any]], Any]) -> Any:
        def choose_and_delete(values: list[Any]) -> Any:
            chosen = choose(values)
            for checkpoint in list_checkpoints(run):
                delete_checkpoint(run, checkpoint.attempt, "test", force=True)
            return chosen

        return method(self, value, choose_and_delete)

    checkpointer = Checkpointer(store, run="r", writer="thread", replica_reads=replica_reads)
    with checkpointer, patch.object(World, "decide", decide), pytest.raises(CkptError) as caught:
        checkpointer.restore(own={"tensor": torch.zeros(3)}, checkpoint=1)
    return {"code": caught.value.code, "message": caught.value.message}


def fail(failing: dict[str, list[Any]]) -> dict[str, Any]:
    """Each rank fails in the step of this number with this error; what it raises, and whether rank 0 has chosen."""
    kinds = {"damaged": CorruptObject, "deleted": NoCheckpoint, "unfit": StateMismatch, "bug": ValueError}
    at, kind = failing.get(str(dist.get_rank()), [-1, ""])
    found: dict[str, Any] = {"chosen": False}

    def step(number: int) -> None:
        if number == at:
            raise kinds[kind](f"{kind} on rank {dist.get_rank()}")

    def choose() -> str:
        found["chosen"] = True
        step(3)
        return "first"

    together = Together(World(30))
    try:
        answers, chosen = together.do_and_choose(
            (lambda: step(0), lambda: step(1), lambda: step(2)), lambda: [dist.get_rank()], choose
        )
        found |= {"answers": answers, "result": chosen}
    except CkptError as error:
        found |= {"code": error.code, "message": error.message}
    found["later"] = together.do(report=dist.get_rank), together.do_and_choose((), lambda: None, lambda: "again")[1]
    return found
