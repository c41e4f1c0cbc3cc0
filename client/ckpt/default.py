"""The module functions: one Checkpointer for the process, made by `init` or, from the environment, by first use."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from ckpt.capture.train_state import Model, Optimizers
from ckpt.checkpointer import Checkpointer
from ckpt.restoring.pipeline import Restored
from ckpt.restoring.tensors import load_tensors
from ckpt.schedule import Schedule
from ckpt.snapshot.handle import SaveHandle
from ckptapi.opening import open_source
from ckptstore.commits.catalog import Checkpoint
from ckptstore.names import Reference

_default: Checkpointer | None = None


def init(store: str | None = None, **arguments: Any) -> Checkpointer:
    """Make the process's Checkpointer; arguments as Checkpointer's. One that was there is closed first."""
    global _default
    close()
    _default = Checkpointer(store, **arguments)
    return _default


def prepare(model: Model | None, optim: Optimizers | None, **extras: Any) -> None:
    """See Checkpointer.prepare."""
    _current().prepare(model, optim, **extras)


def save_async(
    model: Model | None,
    optim: Optimizers | None,
    step: int,
    *,
    grads: bool = False,
    metrics: Mapping[str, float] | None = None,
    **extras: Any,
) -> SaveHandle:
    """See Checkpointer.save_async."""
    return _current().save_async(model, optim, step, grads=grads, metrics=metrics, **extras)


def save(model: Model | None, optim: Optimizers | None, step: int, **arguments: Any) -> Checkpoint:
    """See Checkpointer.save."""
    return _current().save(model, optim, step, **arguments)


def restore(model: Model | None = None, optim: Optimizers | None = None, **arguments: Any) -> Restored | None:
    """See Checkpointer.restore."""
    return _current().restore(model, optim, **arguments)


def load(checkpoint: str | int | None = None, names: str = "*") -> dict[str, torch.Tensor]:
    """Tensors without a model. checkpoint: a step or id, or a URL: store or daemon, a slash, and an id.

    ckpt.load("s3://bucket/ckpts/gpt-small@1000", names="model/*")
    """
    if isinstance(checkpoint, str) and "/" in checkpoint:
        url, _, reference = checkpoint.rpartition("/")
        with closing(open_source(url)) as source:
            return load_tensors(source, source.find(Reference.parse(reference)), names)
    return _current().load(checkpoint, names)


def every(seconds: float | None = None, overhead: float | None = 0.01) -> Schedule:
    """See Checkpointer.every."""
    return _current().every(seconds, overhead)


def latest() -> Checkpoint | None:
    """See Checkpointer.latest."""
    return _current().latest()


def wait(timeout: float | None = None) -> None:
    """See Checkpointer.wait."""
    if _default is not None:
        _default.wait(timeout)


def close(timeout: float | None = None) -> None:
    """See Checkpointer.close."""
    global _default
    checkpointer, _default = _default, None
    if checkpointer is not None:
        checkpointer.close(timeout)


def _current() -> Checkpointer:
    return _default if _default is not None else init()
