"""Copies at the worst moment, for tests of overlap; and scenarios in ranks for tests.support.parallel.runner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.leaves import Change, Leaves
from ckpt.device import Patience
from ckpt.snapshot import overlap
from ckpt.snapshot.guard import ChangeGuard, sample
from ckpt.snapshot.overlap import Overlap, PendingCopy
from ckpt.snapshot.stage import Transfer
from ckptstore.format.shards import Slice
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.support.parallel.built import Built, Setup
from tests.support.parallel.layouts import LAYOUTS
from tests.support.training import same_state

RUN = "overlap"
_PATIENCE_S = 30


@dataclass
class Brake:
    """Holds copies until they are released; counts them."""

    released: threading.Event = field(default_factory=threading.Event)
    at_gate: threading.Event = field(default_factory=threading.Event)
    copies: int = 0


@contextmanager
def held_copies(release_at_gate: bool = False, small_bytes: int = 0) -> Iterator[Brake]:
    """Copies wait to be released; with `release_at_gate`, until an optimizer waits for them. Of any size, unless
    `small_bytes` is how small those are that do not wait. On exit, all copies that began are complete: a later brake
    must not hold them."""
    brake, copy, before_step, begin = Brake(), Transfer.copy, Overlap.before_step, Overlap.begin
    begun: list[PendingCopy] = []

    def held_copy(transfer: Transfer, guard: ChangeGuard, patience: Patience) -> None:
        assert brake.released.wait(_PATIENCE_S)
        brake.copies += 1
        copy(transfer, guard, patience)

    def seen_before_step(self: Overlap, optimizer: torch.optim.Optimizer) -> None:
        brake.at_gate.set()
        if release_at_gate:
            brake.released.set()
        before_step(self, optimizer)

    def seen_begin(self: Overlap, pending: PendingCopy) -> None:
        begin(self, pending)
        begun.append(pending)

    with (
        patch.object(Transfer, "copy", held_copy),
        patch.object(Overlap, "begin", seen_begin),
        patch.object(Overlap, "before_step", seen_before_step),
        patch.object(overlap, "_SMALL_BYTES", small_bytes),
    ):
        try:
            yield brake
        finally:
            brake.released.set()
            for pending in begun:
                assert pending.copied.wait(_PATIENCE_S)


def guarded(kind: Any, *tensors: torch.Tensor) -> Any:
    """A guard of this kind around tensors t0, t1, ..."""
    leaves = Leaves()
    for number, tensor in enumerate(tensors):
        piece = Slice.whole(f"t{number}", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        leaves.append(piece, tensor, tensor, Change.STEP)
    return kind(leaves, list(map(sample, tensors)), [tensor.untyped_storage() for tensor in tensors])


def returns(call: Callable[[], object]) -> Callable[[float], bool]:
    """Start a call in a thread; ask whether it has returned within some seconds."""
    thread = threading.Thread(target=call)
    thread.start()

    def ended(seconds: float) -> bool:
        thread.join(seconds)
        return not thread.is_alive()

    return ended


def stored_alike(store: str, layout: str) -> dict[str, Any]:
    """Each save twice: held until the optimizer steps, and with everything copied on return."""
    built: Built = LAYOUTS[layout].build(Setup())
    model: Any = built.model
    alike, copies = [], 0
    with (
        Checkpointer(f"{store}/eager", run=RUN, overlap=False, writer="thread") as eager,
        Checkpointer(f"{store}/overlap", run=RUN, writer="process" if layout == "ddp" else "thread") as overlapped,
    ):
        for step in range(3):
            built.train_step(step)
            eager.save(model, built.optim, step)
            with held_copies(release_at_gate=True) as brake:
                handle = overlapped.save_async(model, built.optim, step)
                built.train_step(step + 10)
                handle.result(_PATIENCE_S)
            copies += brake.copies
            alike.append(same_state(eager.load(step), overlapped.load(step)))
    return {"alike": alike, "copies": copies}


def change_on_both_ranks(store: str) -> dict[str, Any]:
    """Both ranks halve their weights after the call; only the copy of rank 1 is complete by then."""
    model = nn.ParameterList(torch.ones(1 << 16) for _ in range(4))
    optim = torch.optim.SGD(model.parameters(), lr=0.0)
    with Checkpointer(store, run=RUN, split_replicas=True, writer="thread") as checkpointer:
        checkpointer.save(model, optim, 1)
        with held_copies() as brake:
            if dist.get_rank() == 1:
                brake.released.set()
            handle = checkpointer.save_async(model, optim, 2)
            if dist.get_rank() == 1:
                assert handle.wait_staged(_PATIENCE_S)
            dist.barrier()
            for parameter in model:
                parameter.data.mul_(0.5)
                parameter.grad = torch.zeros_like(parameter)
            brake.released.set()
            optim.step()
            error = handle.exception() if handle._finished.wait(_PATIENCE_S) else None
        checkpointer.save(model, optim, 3)
        steps = [found.step for found in StoreSource(open_store(store)).checkpoints(RUN)]
        values = {name: sorted(set(tensor.tolist())) for name, tensor in checkpointer.load(3, "model/*").items()}
    return {"code": error and error.code, "said": str(error), "steps": steps, "values": values}
