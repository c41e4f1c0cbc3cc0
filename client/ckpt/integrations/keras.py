"""Keras 3 on torch, JAX or TensorFlow: `fit` goes on where it was killed, on the next batch of the same epoch.

    model.fit(x, y, epochs=10, callbacks=[Backup("s3://bucket/ckpts", run="mnist")])

Variables are entries, by Keras's names for them: `weights/dense/kernel`, `optimizer/dense_kernel_velocity`.
`fit` gives callbacks no access to its data. So after a restore it loads the batches of the epoch before the checkpoint
again, from the random state that they were loaded with, and the callback keeps it from training them.

`steps`, or `restore` and `save_async`, do the same for the variables alone, in loops of your own, under any strategy of
`tf.distribute`. Under MultiWorkerMirroredStrategy each worker runs the script and has all variables; the chief writes,
and chooses what is restored. Under all other strategies one process runs the script.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any, Literal

import keras
import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from ckpt import default
from ckpt.capture.rng import host_rng_state, load_rng_state
from ckpt.checkpointer import Checkpointer
from ckpt.loop import Steps, refill
from ckpt.restoring.pipeline import Restored
from ckpt.schedule import Schedule
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import InvalidRequest, StateMismatch
from ckptstore.format.trees import unique

logger = logging.getLogger(__name__)

_INFINITE = -1  # tf.data.INFINITE_CARDINALITY


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
        self._measured = False
        self._restored = restore_from(self.model, self._checkpointer, data=self._place)
        self._step = 0 if self._restored is None else self._restored.step
        self._saved = self._step, self._place.epoch
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
            if self._step - self._saved[0] >= self._interval or (self._schedule and self._schedule.due(self._step)):
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
        if (self._step, self._place.epoch) != self._saved:
            self._save(logs)
        self._checkpointer.wait()

    def _save(self, logs: Mapping[str, float] | None) -> None:
        _sync(self.model)
        metrics = {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
        save_async(
            self.model, self._step, checkpointer=self._checkpointer, metrics=metrics, repeat_step=True, data=self._place
        )
        self._saved = self._step, self._place.epoch

    def _train(self, train: Callable[..., Any], *arguments: Any) -> Any:
        """Stands for the function that trains a step. Its last argument is the iterator, or with torch a batch.

        With JAX it also takes and returns the state.
        """
        if self._fitted.history is not self._history:  # each `fit` has one of its own: ours ended by an error
            self._step_aside()
            return train(*arguments)
        if not self._measured:
            self._measured = True
            _check_data(arguments[-1], None if self._endless else self.params.get("steps"))
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
    """The data that `fit` would iterate over after so many epochs: each iteration over a `tf.data.Dataset` may be
    shuffled in another way. Other iterators as they are."""
    if (dataset := getattr(iterator, "_dataset", None)) is None or not epochs:
        return iterator
    # If `fit` knows the length of an epoch, it makes another iterator at its end, and does not use it.
    for _ in range(epochs * (1 if int(dataset.cardinality()) < 0 else 2)):
        iterator = iter(dataset)
    return iterator


def _check_data(iterator: Any, steps: int | None) -> None:
    """Raise InvalidRequest if an epoch leaves a rest of the data to the next one, and warn of an order that is another
    one in each process. Only data of TensorFlow show it."""
    if (dataset := getattr(iterator, "_dataset", None)) is None:
        return
    batches = int(dataset.cardinality())
    if _has_own_order(dataset):
        logger.warning(
            "tf.data shuffles without a seed: a resumed run gets its batches in another order; pass seed= to shuffle, "
            "or call keras.utils.set_random_seed(n) at the beginning"
        )
    if steps is not None and (batches > steps or batches == _INFINITE):
        raise InvalidRequest(
            f"an epoch of {steps} steps ends before the data, and the next one goes on from there",
            "Give Backup endless=True, or the data take(steps_per_epoch) and no steps_per_epoch",
        )


def _has_own_order(dataset: Any) -> bool:
    """Whether it, or what it is made of, shuffles without a seed: TensorFlow then notes two zeros."""
    seeds = [getattr(dataset, name, 1) for name in ("_seed", "_seed2")]
    return seeds == [0, 0] or any(map(_has_own_order, dataset._inputs()))


def _sync(model: Any) -> None:
    """JAX: give the variables the values that `fit` holds apart from them."""
    if keras.backend.backend() == "jax":
        model.jax_state_sync()


WEIGHTS, OPTIMIZER, SEEDS, METRICS = "weights", "optimizer", "seeds", "metrics"
"""The shared items of a checkpoint. Metrics are those of the epoch so far."""

_GLOBAL_SEED = "global"
_ID_BYTES = 512


def save_async(model: Any, step: int, *, checkpointer: Checkpointer | None = None, **options: Any) -> SaveHandle | None:
    """Save the variables of a compiled model, in a loop of your own. They are copied on return.

    Under `tf.distribute` all processes that run the script call it; the chief writes, and others get None.
    checkpointer: by default that of `ckpt.init`. options: as for `ckpt.save_async`. Raises what that raises.
    """
    # Before the chief is asked for: to read a variable that each replica has for itself is a collective.
    live = variables(model)
    state = {item: {name: _leaf(model, one) for name, one in found.items()} for item, found in live.items()}
    if not _is_chief(_collective_strategy(model)):
        return None
    shared = {**state, **options.pop("shared", {})}
    return (checkpointer or default.current()).save_async(None, None, step, shared=shared, **options)


def restore(model: Any, *, checkpointer: Checkpointer | None = None, **options: Any) -> int:
    """Give a built and compiled model the variables of the newest usable checkpoint, in a loop of your own.

    Returns the step to continue with; 0 without a checkpoint. All processes that run the script call it, under any
    strategy. options: as for `ckpt.restore`. Raises InvalidRequest for a model that is not built, or an optimizer that
    is an attribute of it; StateMismatch, before anything is changed, if a variable is missing, left over or has another
    shape.
    """
    restored = restore_from(model, checkpointer or default.current(), **options)
    return 0 if restored is None else restored.step + 1


def steps(
    model: Any,
    num_steps: int,
    *,
    schedule: Schedule | int | None = None,
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> Steps:
    """The steps that are left of `range(num_steps)` in a loop of your own, as `ckpt.steps` gives them.

    Restores the model now; saves after the steps that are due and the last one. options: extras and `shared`, as for
    `ckpt.steps`. Workers of MultiWorkerMirroredStrategy measure for themselves what a save costs, but must save
    together: they need a number as schedule. Raises InvalidRequest without one, and what `restore` and `save_async`
    raise.
    """
    target = checkpointer or default.current()
    if _collective_strategy(model) is not None and not isinstance(schedule, int):
        raise InvalidRequest("several workers have no schedule in common", "Give a number of steps: schedule=500")
    restored = restore_from(model, target, **options)
    refill(restored, options)
    save = partial(save_async, model, checkpointer=target, **options)
    return Steps(target, save, schedule, restored.step if restored else -1, restored, num_steps)


def restore_from(model: Any, checkpointer: Checkpointer, **options: Any) -> Restored | None:
    """The same; all but the metrics, whose arrays are in `Restored.values`."""
    if not model.built:
        raise InvalidRequest("the model is not built", "Give it an Input, or call it on a batch of data")
    for attribute, optimizer in _optimizers(model).items():
        if optimizer.built:
            continue
        if attribute:  # which variables it trains is in `train_step`
            raise InvalidRequest(
                f"the optimizer {attribute} of the model is not built",
                f"Call model.{attribute}.build() with the variables that it trains, so that its state has a place",
            )
        with model.distribute_strategy.scope() if keras.backend.backend() == "tensorflow" else nullcontext():
            optimizer.build(model.trainable_variables)
    restored = _agreed(model, checkpointer, options)
    if restored is not None:
        if _GLOBAL_SEED in restored.values[SEEDS]:
            global_seed_generator()  # random operations have made it after this point, and will again
        elif (generator := get_global_attribute(GLOBAL_SEED_GENERATOR)) is not None:
            restored.values[SEEDS][_GLOBAL_SEED] = generator.state.numpy()
        fill(model, (WEIGHTS, OPTIMIZER, SEEDS), restored)
    return restored


def fill(model: Any, items: Iterable[str], restored: Restored) -> None:
    """Assign what was restored to the variables of these items. Raises StateMismatch before it changes anything."""
    live = variables(model)
    pairs, problems = [], []
    for item in items:
        found, here = restored.values[item], live[item]
        problems += [f"{item}/{name} is on one side only" for name in sorted(found.keys() ^ here.keys())]
        for name in found.keys() & here.keys():
            pair = here[name], found[name]
            for variable, value in _by_replica(model, *pair) if item == METRICS else [pair]:
                pairs.append((variable, value))
                if tuple(variable.shape) != tuple(value.shape):
                    shapes = f"{list(value.shape)} in the checkpoint, {list(variable.shape)} here"
                    problems.append(f"{item}/{name}: {shapes}")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise StateMismatch(
            f"{restored.id} does not fit: {'; '.join(problems[:8])}{more}",
            "Build and compile the model as it was saved, with the same names of layers",
        )
    for variable, value in pairs:
        variable.assign(value)


def variables(model: Any) -> dict[str, dict[str, Any]]:
    """The variables of a model by item and name. Names of the model and of the optimizer are left out of them: Keras
    numbers these in each process."""
    weights, metrics = list(model.weights), list(model.metrics_variables)
    known = {id(one) for one in (*weights, *metrics)}
    seeds = _named([one for one in model.variables if id(one) not in known], f"{model.name}/")
    if (generator := get_global_attribute(GLOBAL_SEED_GENERATOR)) is not None:
        seeds[_GLOBAL_SEED] = generator.state
    slots = {
        f"{attribute}/{name}" if attribute else name: one
        for attribute, optimizer in _optimizers(model).items()
        for name, one in _named(optimizer.variables, f"{optimizer.name}/", f"{model.name}_").items()
    }
    return {WEIGHTS: _named(weights, f"{model.name}/"), OPTIMIZER: slots, SEEDS: seeds, METRICS: _named(metrics)}


def _optimizers(model: Any) -> dict[str, Any]:
    """The one that the model was compiled with, as "", then those that are attributes of a model with a `train_step` of
    its own, such as the two of a GAN, by attribute."""
    compiled = getattr(model, "optimizer", None)
    known = {id(compiled), id(getattr(compiled, "inner_optimizer", None))}
    found = {id(one): (name, one) for name, one in vars(model).items() if isinstance(one, keras.optimizers.Optimizer)}
    own = dict(pair for number, pair in found.items() if number not in known)
    return own if compiled is None else {"": compiled, **own}


def _named(found: Iterable[Any], *prefixes: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for one in found:
        named[unique(reduce(str.removeprefix, prefixes, one.path), named)] = one
    return named


def _leaf(model: Any, variable: Any) -> Any:
    """The arrays that a save copies: of TensorFlow a copy already, of torch and JAX the live memory."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        summands = _summands(model, variable)
        return np.stack([one.numpy() for one in summands]) if summands else np.asarray(variable.numpy())
    return variable.value.detach() if backend == "torch" else variable.value


def _by_replica(model: Any, variable: Any, value: Any) -> list[tuple[Any, Any]]:
    """The values for the variables of which a metric consists, if the checkpoint has that of each replica."""
    if len(value.shape) == len(variable.shape):
        return [(variable, value)]
    summands = _summands(model, variable)
    return list(zip(summands, value, strict=True)) if len(summands) == len(value) else [(variable, value.sum(0))]


def _summands(model: Any, variable: Any) -> Sequence[Any]:
    """The variables, one of each replica, whose sum a metric is. As their sum alone they would round in another way."""
    if keras.backend.backend() != "tensorflow":
        return ()
    import tensorflow as tf

    value = variable.value
    kind = getattr(value, "synchronization", None), getattr(value, "aggregation", None)
    if kind != (tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM):
        return ()
    found: Sequence[Any] = model.distribute_strategy.experimental_local_results(value)
    return found if len(found) > 1 else ()


def _agreed(model: Any, checkpointer: Checkpointer, options: dict[str, Any]) -> Restored | None:
    """The result of the chief's restore, on all workers."""
    asked: dict[str, Any] = dict.fromkeys((WEIGHTS, OPTIMIZER, SEEDS, METRICS))
    strategy = _collective_strategy(model)
    chief = _is_chief(strategy)
    options["shared"] = {**asked, **options.pop("shared", {})}
    restored = checkpointer.restore(**options) if chief else None
    if strategy is None:
        return restored
    name = _from_chief(strategy, "" if restored is None else restored.id)
    if chief or not name:
        return restored
    return checkpointer.restore(**{**options, "checkpoint": name})


def _collective_strategy(model: Any) -> Any:
    """The strategy under which several processes run this script; None if it is one."""
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    strategy = model.distribute_strategy
    is_collective = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return strategy if is_collective and strategy.cluster_resolver.cluster_spec().jobs else None


def _is_chief(strategy: Any) -> bool:
    if strategy is None:
        return True
    resolver = strategy.cluster_resolver
    first = ("chief" if "chief" in resolver.cluster_spec().jobs else "worker", 0)
    return (resolver.task_type, resolver.task_id) == first


def _from_chief(strategy: Any, text: str) -> str:
    """The text of the chief, on all workers; those of others are empty."""
    import tensorflow as tf

    codes = np.zeros((1, _ID_BYTES), np.int32)
    codes[0, : len(text.encode())] = list(text.encode())
    every = tf.function(lambda: strategy.gather(strategy.run(lambda: tf.constant(codes)), axis=0), autograph=False)()
    return bytes(every.numpy().max(0).tolist()).rstrip(b"\0").decode()
