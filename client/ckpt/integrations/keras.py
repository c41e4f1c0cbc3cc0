"""Keras 3 on torch, JAX or TensorFlow: `fit` goes on where it was killed, on the next batch of the same epoch.

    model.fit(x, y, epochs=10, callbacks=[Backup("s3://bucket/ckpts", run="mnist")])

Variables are entries, by Keras's names for them: `weights/dense/kernel`, `optimizer/dense_kernel_velocity`.
`fit` gives callbacks no access to its data. So after a restore it loads the batches of the epoch before the checkpoint
again, from the random state that they were loaded with, and the callback keeps it from training them.

`steps`, or `restore` and `save_async`, do the same for the variables alone, in loops of your own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import keras
import numpy as np

from ckpt.capture.rng import host_rng_state, load_rng_state
from ckpt.checkpointer import Checkpointer
from ckpt.integrations.keras_variables import METRICS, fill, restore, restore_from, save_async, steps
from ckptstore.errors import InvalidRequest, StateMismatch

_INFINITE = -1  # tf.data.INFINITE_CARDINALITY

__all__ = ["Backup", "restore", "save_async", "steps"]


class Backup(keras.callbacks.Callback):
    """Saves while `fit` trains, and lets it go on from the newest usable checkpoint; one run for each call of `fit`.

    On TensorFlow it needs a model that is built. A step is the number of batches trained since the beginning. When
    `fit` returns, its end is saved and every save is durable; the script, run again, then trains nothing.
    """

    def __init__(
        self,
        store: str | None = None,
        run: str | None = None,
        *,
        save_freq: int | Literal["epoch", "auto"] = "epoch",
        endless: bool = False,
        **options: Any,
    ) -> None:
        """store, run, options: as for `ckpt.Checkpointer`.

        save_freq: when to save: "epoch": at the end of each; a number: after so many batches; "auto": as often as it
            costs 1 % of training time (`ckpt.every`).
        endless: one iteration over the data lasts for all epochs, as with `repeat()` and `steps_per_epoch`: all its
            batches are loaded again. The torch back end cannot.
        """
        super().__init__()
        if save_freq not in ("epoch", "auto") and not (isinstance(save_freq, int) and save_freq > 0):
            raise InvalidRequest(f"save_freq is {save_freq!r}", "Give 'epoch', 'auto' or a number of batches")
        if endless and keras.backend.backend() == "torch":
            raise InvalidRequest("the torch back end has no iterator to skip in", "Give `fit` data with an end")
        self._checkpointer = Checkpointer(store, run=run, **options)
        self._schedule = self._checkpointer.every() if save_freq == "auto" else None
        self._interval = save_freq if isinstance(save_freq, int) else math.inf
        self._each_epoch, self._endless = save_freq == "epoch", endless

    def on_train_begin(self, logs: Any = None) -> None:
        """Restore the variables, and name the epoch to continue with."""
        self._place, self._built = _Place(), keras.backend.backend() != "tensorflow"
        self._iterator: Any = None
        self._measured = self._endless
        self._restored = restore_from(self.model, self._checkpointer, data=self._place)
        self._step = self._saved_step = 0 if self._restored is None else self._restored.step
        self._saved_epoch = self._place.epoch
        if self._restored is not None:
            self.model._initial_epoch = self._place.epoch
        self._fitted = self.model  # within a step, `self.model` would give JAX's variables their values
        self._history = self.model.history
        self._step_aside()  # an earlier `fit` may have ended by an error
        self.model.train_function = partial(self._train, self.model.train_function)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the random state from which this epoch is shuffled; after a restore, put it back."""
        place, self._iterator = self._place, None
        self.model._initial_epoch = None  # `fit` has read it; it would hold for the next one, if this one fails
        if self._restored is not None and not (place.batch or self._endless):
            self._arrive()
        if self._restored is not None:
            load_rng_state(place.begun)
            return
        place.first = epoch if place.first is None else place.first
        place.epoch, place.batch = epoch, 0
        if not self._endless or epoch == place.first:
            place.begun = host_rng_state()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Save if it is time; after a restore, see whether all batches that were trained before it are left out."""
        place, done = self._place, batch + 1
        if self._restored is None:
            self._step += done - place.batch
            place.batch = done
            if self._step - self._saved_step >= self._interval or (self._schedule and self._schedule.due(self._step)):
                self._save(logs)
        elif done > place.batch:
            raise self._mismatch("that is within a step here")
        elif done == place.batch:
            _sync(self.model)
            fill(self.model, (METRICS,), self._restored)
            self._arrive()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save, if that is to be done at each end of an epoch."""
        if self._restored is not None:
            raise self._mismatch("the data end before it")
        self._place.epoch, self._place.batch = epoch + 1, 0
        if self._each_epoch:
            self._save(logs)

    def on_train_end(self, logs: Any = None) -> None:
        """Save the end of training, and wait until it is durable."""
        self._step_aside()
        self.model._initial_epoch = None
        if (self._step, self._place.epoch) != (self._saved_step, self._saved_epoch):
            self._save(logs)
        self._checkpointer.wait()

    def _save(self, logs: Mapping[str, float] | None) -> None:
        _sync(self.model)
        metrics = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        save_async(
            self.model, self._step, checkpointer=self._checkpointer, metrics=metrics, repeat_step=True, data=self._place
        )
        self._saved_step, self._saved_epoch = self._step, self._place.epoch

    def _train(self, train: Callable[..., Any], *arguments: Any) -> Any:
        """Stands for the function that trains a step. Its last argument is the iterator, or with torch a batch.

        With JAX it also takes and returns the state.
        """
        if self._fitted.history is not self._history:  # each `fit` has one of its own: ours ended by an error
            self._step_aside()
            return train(*arguments)
        if not self._measured:
            self._measured = True
            _check_epoch(arguments[-1], self.params.get("steps"))
        if self._restored is not None and self._leaves_out(arguments[-1]):
            return ({}, arguments[0]) if len(arguments) == 2 else {}
        if self._iterator is not None:
            return train(*arguments[:-1], self._iterator)
        self._step_aside()
        return train(*arguments)

    def _step_aside(self) -> None:
        """Let the model train by itself."""
        if isinstance(train := self._fitted.train_function, partial):
            self._fitted.train_function = train.args[0]

    def _leaves_out(self, iterator: Any) -> bool:
        place = self._place
        if keras.backend.backend() == "torch":
            return True
        if self._iterator is None:
            self._iterator = iterator if self._endless else _iteration(iterator, place.epoch - (place.first or 0))
            self._load(self._step - place.batch if self._endless else 0)
        if place.batch:
            self._load(self.model.steps_per_execution)
            return True
        self._arrive()
        return False

    def _load(self, batches: int) -> None:
        batch = None
        for _ in range(batches):
            if (batch := next(self._iterator, None)) is None:
                raise self._mismatch("the data end before it")
        if batch is not None and not self._built:
            # TensorFlow makes the metrics when it traces the first step, which is too late for their values.
            self.model._symbolic_build(data_batch=batch)
            self._built = True

    def _arrive(self) -> None:
        self._restored = None
        self._place.restore_rng()

    def _mismatch(self, why: str) -> StateMismatch:
        assert self._restored is not None
        return StateMismatch(
            f"{self._restored.id} is at batch {self._place.batch} of epoch {self._place.epoch}, and {why}",
            "Give `fit` the data, batch_size and steps_per_execution of the run that was saved",
        )


class _Place:
    """Where `fit` is in its data. The core takes it for a loader that reaches its position later (`Resumable`)."""

    def __init__(self) -> None:
        self.epoch = 0
        self.batch = 0
        """Number of the batches of this epoch that were trained."""
        self.first: int | None = None
        """The epoch in which training began."""
        self.begun: dict[str, Any] = {}
        """The random state with which the iteration over the data began."""
        self.restore_rng: Callable[[], None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batch": self.batch, "first": self.first, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def check_state_dicts(self, states: Sequence[Any]) -> None:
        """Nothing to check: one process has the position."""

    def restore_rng_at_position(self, restore_rng: Callable[[], None]) -> None:
        self.restore_rng = restore_rng


def _iteration(iterator: Any, epochs: int) -> Any:
    """What `fit` would iterate over after so many epochs: each iteration over a `tf.data.Dataset` may be shuffled in
    another way. Other iterators as they are."""
    if (dataset := getattr(iterator, "_dataset", None)) is None or not epochs:
        return iterator
    # If `fit` knows the length of an epoch, it makes another iterator at its end, and does not use it.
    for _ in range(epochs * (1 if int(dataset.cardinality()) < 0 else 2)):
        iterator = iter(dataset)
    return iterator


def _check_epoch(iterator: Any, steps: int | None) -> None:
    """Raise InvalidRequest if an epoch leaves a rest of the data to the next one. Only data of TensorFlow show it."""
    batches = int(dataset.cardinality()) if (dataset := getattr(iterator, "_dataset", None)) is not None else 0
    if steps is not None and (batches > steps or batches == _INFINITE):
        raise InvalidRequest(
            f"an epoch of {steps} steps ends before the data, and the next one goes on from there",
            "Give Backup endless=True, or the data take(steps_per_epoch) and no steps_per_epoch",
        )


def _sync(model: Any) -> None:
    """JAX: give the variables the values that `fit` holds apart from them."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
