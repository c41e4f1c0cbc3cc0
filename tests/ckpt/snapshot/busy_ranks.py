"""Two ranks of which one's uploads stand still, or fail: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.snapshot import writers
from ckpt.snapshot.handle import SaveHandle
from ckptstore import names
from ckptstore.errors import CkptError, SaveSkipped
from ckptstore.names import Attempt, RunKeys, derive_ulid
from tests.ckpt.snapshot.gates import Gate, gated
from tests.ckpt.snapshot.overlapping import held_copies
from tests.ckpt.snapshot.saving_ranks import RUN
from tests.support.waiting import wait_until

_COMMIT_TIMEOUT_S = 300.0
_AT_ONCE_S = 60.0
"""A handle that has no result by then waits for the commit's time-out."""


def rank_one_is_busy(store: str, on_busy: Literal["skip", "supersede"]) -> dict[str, Any]:
    """Step 2 hangs in rank 1's upload, step 3 waits behind it, and 4 and 5 find no slot."""
    rank, gate = dist.get_rank(), Gate()
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with (
        patch.object(writers, "open_store", gated(gate)),
        Checkpointer(
            store, run=RUN, writer="thread", slots=2 if rank else 8, on_busy=on_busy, peer_timeout_s=_COMMIT_TIMEOUT_S
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
                wait_until(lambda: gate.waiting == 1)
        gate.open()
        committed, skipped = [1], {}
        for step, handle in handles.items():
            try:
                committed.append(handle.result(_AT_ONCE_S).step)
            except SaveSkipped as error:
                skipped[str(step)] = str(error)
    return {"committed": committed, "skipped": skipped}


def rank_one_fails(store: str) -> dict[str, Any]:
    """Rank 1 loses its saver in step 2, cannot write its shard in step 3, and its snapshot of step 4 is torn."""
    rank, errors = dist.get_rank(), {}
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(128, 128)})  # of a size that is copied beside training
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(store, run=RUN, peer_timeout_s=_COMMIT_TIMEOUT_S) as checkpointer:
        checkpointer.save(model, optim, 1)
        for step, fail in ((2, _kill_saver), (3, _block_shard), (4, _tear)):
            nn.init.constant_(model.get_parameter(f"stage{rank}.weight"), step)
            handle = fail(checkpointer, model, optim, step, Path(store))
            errors[step] = _error(handle)
            try:
                checkpointer.wait()
            except CkptError:
                pass  # the death of the saver, which the save died of
            dist.barrier()
        committed = checkpointer.save(model, optim, 5).step
    return {"errors": errors, "committed": committed}


def rank_one_loses_its_idle_saver(store: str) -> dict[str, Any]:
    """Rank 1's saver is killed between two saves. The loop logs what save_async raises, and goes on."""
    rank, raised, failed, committed = dist.get_rank(), {}, {}, []
    model = nn.ModuleDict({f"stage{rank}": nn.Linear(4, 4)})
    with Checkpointer(store, run=RUN, peer_timeout_s=_COMMIT_TIMEOUT_S) as checkpointer:
        checkpointer.save(model, None, 1)
        if rank == 1 and checkpointer.saver_pid is not None:
            os.kill(checkpointer.saver_pid, signal.SIGKILL)
            wait_until(lambda: checkpointer.saver_pid is None)
        handles: list[SaveHandle] = []
        for step in (2, 3, 4):
            try:
                handles.append(checkpointer.save_async(model, None, step))
            except CkptError as error:
                raised[step] = error.code
            wait_until(lambda: all(handle.done() for handle in handles))  # without reading their errors
            dist.barrier()
        for handle in handles:
            if handle.exception() is None:
                committed.append(handle.step)
            else:
                failed[handle.step] = _error(handle)
    return {"raised": raised, "failed": failed, "committed": committed}


def _kill_saver(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    pid = checkpointer.saver_pid
    assert pid is not None
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGSTOP)
    handle = checkpointer.save_async(model, optim, step)
    optim.step()
    if dist.get_rank() == 1:
        os.kill(pid, signal.SIGKILL)
    return handle


def _block_shard(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    session = checkpointer._saves.agreed.session
    assert session is not None
    attempt = Attempt(step, derive_ulid(session, step, 0), generation=1)
    if dist.get_rank() == 1:
        (store / RunKeys(RUN).shard(attempt, names.shard_name(1))).mkdir(parents=True)
    return checkpointer.save_async(model, optim, step)


def _tear(checkpointer: Checkpointer, model: Any, optim: Any, step: int, store: Path) -> SaveHandle:
    with held_copies() as brake:
        handle = checkpointer.save_async(model, optim, step)
        if dist.get_rank() == 1:
            nn.init.constant_(model.get_parameter("stage1.weight"), 7.0)
        brake.released.set()
        optim.step() if dist.get_rank() == 0 else checkpointer._saves._join()
    return handle


def _error(handle: SaveHandle) -> tuple[str, str]:
    try:
        handle.result(_AT_ONCE_S)
    except CkptError as error:
        return error.code, error.message
    raise AssertionError(f"{handle} did not fail")
