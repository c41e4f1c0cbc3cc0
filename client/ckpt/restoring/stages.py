"""A restore in stages: each object when it exists, all from one checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckpt.capture.train_state import MODEL, Resumable, TrainState
from ckpt.restoring.pipeline import Restored
from ckptstore.errors import InvalidRequest

if TYPE_CHECKING:
    from ckpt.capture.train_state import Model, Optimizers

Restore = Callable[[TrainState, str | int | None], Restored | None]
"""Restores a state from a checkpoint, the newest usable one for None; leaves random state as it is."""


class StagedRestore:
    """The stages of one restore; made by `Checkpointer.restore_in_stages`, for the training thread.

        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            optim = AdamW(model.parameters())
            stages.optimizers(optim)
            stages.extras(scheduler=sched, loader=loader)

    Random state is put back by `stages.rng()`, or when the block ends without an error.

    Under a process group each stage is a collective: all ranks call the same ones in the same order. The first stage
    chooses the checkpoint, and skips a damaged one; a later stage raises CorruptObject. A lease protects it from the
    first stage on. `Checkpointer.restore` explains what a stage returns and raises. Without a checkpoint every stage
    returns None and changes nothing.
    """

    def __init__(self, restore: Restore, checkpoint: str | int | None) -> None:
        self._restore = restore
        self._checkpoint = checkpoint
        self._model: Model | None = None
        self._loaders: list[Resumable] = []
        self._begun = self._rng_done = False
        self.restored: Restored | None = None
        """The result of the newest stage; None before the first one, or if the run has no checkpoint."""

    def model(self, model: Model) -> Restored | None:
        """Restore the model."""
        self._model = model
        return self._stage(TrainState.of(model, None, {}))

    def optimizers(self, optim: Optimizers) -> Restored | None:
        """Restore optimizers. The model, whose names their state has, must have been restored; it is not read again.

        Saves continue from this checkpoint, as after `restore` with an optimizer. Raises InvalidRequest.
        """
        if self._model is None:
            raise InvalidRequest("optimizer state has the names of the model's parameters", "Call model(model) first")
        return self._stage(replace(TrainState.of(self._model, optim, {}), placed=frozenset((MODEL,))))

    def extras(self, shared: Mapping[str, Any] | None = None, **extras: Any) -> Restored | None:
        """Restore further objects: modules, schedulers, loaders; plain data is in `Restored.values` of the result."""
        state = TrainState.to_restore(None, None, extras, shared)
        self._loaders += [value for value in state.others.values() if isinstance(value, Resumable)]
        return self._stage(state)

    def rng(self) -> None:
        """Put random state back: last, before the first step."""
        self._rng_done = True
        if self.restored is None or self.restored.rng is None:
            return
        self.restored.restore_rng()
        for loader in self._loaders:
            loader.restore_rng_at_position(self.restored.rng)

    def __enter__(self) -> StagedRestore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._rng_done:
            self.rng()

    def _stage(self, state: TrainState) -> Restored | None:
        if self._begun and self.restored is None:
            return None
        restored = self._restore(state, self._checkpoint)
        self._begun = True
        if restored is not None:
            self.restored, self._checkpoint = restored, restored.id
        return restored
