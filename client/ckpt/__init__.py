"""Asynchronous, verified, atomic checkpoints for PyTorch training.

    import ckpt

    ckpt.init("file:///mnt/ckpts", run="gpt-small")
    loader = ckpt.data.resumable(DataLoader(...))
    restored = ckpt.restore(model, optim, scheduler=sched, loader=loader)
    ...
    ckpt.save_async(model, optim, step, scheduler=sched, loader=loader)
    ...
    ckpt.close()

Names are loaded when first used: the saver process imports this package and must not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt import data
    from ckpt.checkpointer import Checkpointer
    from ckpt.default import (
        Checkpoints,
        checkpoints,
        close,
        delete,
        every,
        fits,
        follow,
        init,
        latest,
        load,
        on_preemption,
        prepare,
        publish,
        restore,
        restore_in_stages,
        runs,
        save,
        save_async,
        wait,
    )
    from ckpt.loop import epochs, steps
    from ckpt.preemption import SaveEstimate
    from ckpt.restoring.pipeline import Restored
    from ckpt.schedule import Schedule
    from ckpt.snapshot.handle import Counters, SaveHandle, Timings
    from ckptplan.plan import plan
    from ckptstore.commits.catalog import Checkpoint
    from ckptstore.errors import CkptError

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "Checkpoints",
    "CkptError",
    "Counters",
    "Restored",
    "SaveEstimate",
    "SaveHandle",
    "Schedule",
    "Timings",
    "checkpoints",
    "close",
    "data",
    "delete",
    "epochs",
    "every",
    "fits",
    "follow",
    "init",
    "latest",
    "load",
    "on_preemption",
    "plan",
    "prepare",
    "publish",
    "restore",
    "restore_in_stages",
    "runs",
    "save",
    "save_async",
    "steps",
    "wait",
]

_HOME = {
    "Checkpoint": "ckptstore.commits.catalog",
    "Checkpointer": "ckpt.checkpointer",
    "CkptError": "ckptstore.errors",
    "Counters": "ckpt.snapshot.handle",
    "SaveEstimate": "ckpt.preemption",
    "Restored": "ckpt.restoring.pipeline",
    "SaveHandle": "ckpt.snapshot.handle",
    "Schedule": "ckpt.schedule",
    "Timings": "ckpt.snapshot.handle",
    "epochs": "ckpt.loop",
    "plan": "ckptplan.plan",
    "steps": "ckpt.loop",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    if name == "data":
        return import_module("ckpt.data")
    return getattr(import_module(_HOME.get(name, "ckpt.default")), name)


def __dir__() -> list[str]:
    return __all__
