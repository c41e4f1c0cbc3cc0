"""Meetings of a restore: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckpt.restoring.together import Together
from ckptstore.errors import CkptError, CorruptObject, StateMismatch


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


def fail(failing: dict[str, list[Any]]) -> dict[str, Any]:
    """Each rank fails in the step of this number with this error; what it raises, and whether rank 0 has chosen."""
    kinds = {"damaged": CorruptObject, "unfit": StateMismatch, "bug": ValueError}
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
    found["later"] = together.do(report=dist.get_rank), together.choose(lambda: "again")
    return found
