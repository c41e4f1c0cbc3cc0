"""Accelerate: the state of an Accelerator, saved asynchronously on all ranks and restored exactly.

    model, optim, loader, sched = accelerator.prepare(model, optim, loader, sched)
    restored = load_state(accelerator)
    step = restored.step + 1 if restored else 0
    for epoch in range(loader.iteration, num_epochs):
        for batch in loader:
            ...
            save_state(accelerator, step)
            step += 1

The functions use the process's Checkpointer: `ckpt.init`, or CKPT_STORE and CKPT_RUN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ckpt import default
from ckpt.capture.rng import RngOnce
from ckpt.data import ResumableLoader
from ckpt.integrations.keeping import add_assets
from ckpt.restoring.pipeline import Restored
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import StateMismatch

_ITERATION = "iteration"


def save_state(accelerator: Accelerator, step: int, metrics: Mapping[str, float] | None = None) -> SaveHandle:
    """Save what was prepared and registered for checkpointing: models, optimizers, schedulers, loaders, the scaler and
    custom objects, in the background; within `accumulate` also the gradients of an unfinished window. Call it on all
    ranks, from the training thread, after `load_state`. Raises what `ckpt.save_async` raises, and AttributeError if
    `load_state` was not called.
    """
    default.current()._saves.looks = False
    scaler = accelerator.scaler
    trainer = {
        "step": accelerator.step,
        "schedulers": [one.state_dict() for one in accelerator._schedulers],
        "custom": [one.state_dict() for one in accelerator._custom_objects],
        "scaler": scaler and scaler.state_dict(),
    }
    return default.save_async(
        _model(accelerator), _optimizers(accelerator), step,
        grads=not accelerator.sync_gradients, metrics=metrics, shared={"trainer": trainer}, **_extras(accelerator),
    )  # fmt: skip


def load_state(accelerator: Accelerator, checkpoint: str | int | None = None, strict: bool = True) -> Restored | None:
    """Restore the newest checkpoint of the run, or the named one; None if the run has none. Call it on all ranks, after
    `prepare` and before the first iteration, also if there is nothing to restore: it makes the loaders resumable.

    The loaders continue at the next batch, without `skip_first_batches`; `loader.iteration` is the number of the epoch.
    Raises StateMismatch for another number of schedulers or custom objects, and what `ckpt.restore` raises.
    """
    add_assets(default.current(), _model(accelerator))
    for loader in accelerator._dataloaders:
        if isinstance(loader, DataLoaderShard) and not isinstance(loader.base_dataloader, _Tracked):
            loader.base_dataloader = _Tracked(loader.base_dataloader)
            loader.dl_state_dict = loader.base_dataloader.state_dict()
    restored = default.restore(
        _model(accelerator), _optimizers(accelerator), checkpoint=checkpoint, strict=strict, shared={"trainer": None},
        **_extras(accelerator),
    )  # fmt: skip
    if restored is None:
        return None
    saved = restored.values["trainer"]
    for kind, objects, states in (
        ("schedulers", accelerator._schedulers, saved["schedulers"]),
        ("custom objects", accelerator._custom_objects, saved["custom"]),
    ):
        if len(objects) != len(states):
            raise StateMismatch(
                f"the checkpoint has {len(states)} {kind}, and the accelerator {len(objects)}",
                "Prepare and register the objects that were saved",
            )
        for one, state in zip(objects, states, strict=True):
            one.load_state_dict(state)
    if accelerator.scaler is not None and saved["scaler"] is not None:
        accelerator.scaler.load_state_dict(saved["scaler"])
    accelerator.step = saved["step"]
    restored.restore_rng()  # last: a custom object may have drawn random numbers
    return restored


class _Tracked(ResumableLoader[Any]):
    """A loader that Accelerate takes for the DataLoader that it stands in for."""

    @property
    def __class__(self) -> type:
        return DataLoader

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise TypeError("the class of a loader is fixed")


class _Position:
    """The position of a prepared loader: Accelerate fetches one batch ahead, and notes the state before it does.

    Its notes are out of date once a loop has left the loader by `break`. Then Accelerate does not count the
    iteration, and its samplers get the same number again; so this number is kept as well.
    """

    def __init__(self, loader: DataLoaderShard) -> None:
        self._loader, self._tracked = loader, loader.base_dataloader

    def state_dict(self) -> dict[str, Any]:
        iteration = self._tracked._iteration
        begun = iteration and iteration()  # the one that a loop goes through, also at its last batch; None otherwise
        noted = self._tracked.state_dict() if begun is None else self._loader.dl_state_dict
        ends = begun is not None and begun.ended  # at the last batch: counted when the loop asks for one more
        return {**_without("_iterator_finished", noted), _ITERATION: self._loader.iteration + int(ends)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracked.load_state_dict(_without(_ITERATION, state))
        self._loader.set_epoch(state[_ITERATION])
        self._loader.dl_state_dict = self._tracked.state_dict()

    def check_state_dicts(self, states: Sequence[Any]) -> None:
        self._tracked.check_state_dicts([_without(_ITERATION, state) for state in states])

    def restore_rng_at_position(self, restore_rng: RngOnce) -> None:
        self._tracked.restore_rng_at_position(restore_rng)


def _without(left_out: str, state: dict[str, Any]) -> dict[str, Any]:
    """The part that the resumable loader made."""
    return {name: value for name, value in state.items() if name != left_out}


def _model(accelerator: Accelerator) -> nn.Module | None:
    return next(iter(accelerator._models), None)


def _optimizers(accelerator: Accelerator) -> list[Optimizer] | None:
    return [prepared.optimizer for prepared in accelerator._optimizers] or None


def _extras(accelerator: Accelerator) -> dict[str, Any]:
    """The other models, and positions of loaders. Iterable data sets that the first rank fetches for all have none."""
    loaders = (one for one in accelerator._dataloaders if isinstance(one, DataLoaderShard))
    positions = {f"loader{i or ''}": _Position(loader) for i, loader in enumerate(loaders)}
    return {f"model{i}": model for i, model in enumerate(accelerator._models) if i} | positions
