"""A trainer whose memory is replaced while it is copied: `replaced_memory STORE`. Prints how each save ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckptstore.errors import SnapshotTorn
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import held_copies
from tests.support.waiting import wait_until

_PATIENCE_S = 30
_QUEUE: Any = torch.multiprocessing.get_context("spawn").Queue()


def _put(parameter: nn.Parameter) -> None:
    _QUEUE.put(parameter)  # its own thread replaces the memory, which nothing else may use meanwhile
    wait_until(parameter.is_shared, "the memory to be shared", _PATIENCE_S)


def _share(parameter: nn.Parameter) -> None:
    parameter.data.share_memory_()  # type: ignore[no-untyped-call]


def _resize(parameter: nn.Parameter) -> None:
    parameter.untyped_storage().resize_(2 * parameter.nbytes)


def _free(parameter: nn.Parameter) -> None:
    data = parameter.detach().clone()
    parameter.untyped_storage().resize_(0)
    parameter.untyped_storage().resize_(data.nbytes)
    parameter.data.copy_(data)


CALLS: dict[str, Callable[[nn.Parameter], None]] = {"put": _put, "share": _share, "resize": _resize, "free": _free}


def main() -> None:
    """Try each call in a store of its own."""
    for name, call in CALLS.items():
        sys.stdout.write(f"{name} {_end(Path(sys.argv[1]) / name, call)}\n")
        sys.stdout.flush()
    _QUEUE.cancel_join_thread()


def _end(store: Path, call: Callable[[nn.Parameter], None]) -> str:
    """Save, replace the memory of the last parameter, step. Returns how the save ended."""
    model = nn.ParameterList([torch.randn(1 << 16), torch.randn(1 << 20)])
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = [parameter.detach().clone() for parameter in model]
    with open_run(store) as checkpointer, held_copies() as brake:
        handle = checkpointer.save_async(model, optim, 1)
        threading.Timer(0.5, brake.released.set).start()
        call(model[1])
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optim.step()
        try:
            handle.result(_PATIENCE_S)
        except SnapshotTorn:
            return "torn"
        found = checkpointer.load(1, "model/*")
    same = [torch.equal(found[f"model/{number}"], tensor) for number, tensor in enumerate(expected)]
    return f"committed {same}"


if __name__ == "__main__":
    main()
