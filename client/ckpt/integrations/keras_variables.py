"""The variables of Keras models by name, saved and restored on any back end and under any strategy of `tf.distribute`.

Under MultiWorkerMirroredStrategy each worker runs the script and has all variables; the chief writes, and chooses what
is restored. Under all other strategies one process runs the script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.global_state import get_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator

from ckpt import default
from ckpt.checkpointer import Checkpointer
from ckpt.loop import Steps, refill
from ckpt.restoring.pipeline import Restored
from ckpt.schedule import Schedule
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import InvalidRequest, StateMismatch

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
    start, save = restored.step + 1 if restored else 0, partial(save_async, model, checkpointer=target, **options)
    return Steps(target, save, schedule, start, num_steps, restored)


def restore_from(model: Any, checkpointer: Checkpointer, **options: Any) -> Restored | None:
    """The same; all but the metrics, whose arrays are in `Restored.values`."""
    if not model.built:
        raise InvalidRequest("the model is not built", "Give it an Input, or call it on a batch of data")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope() if keras.backend.backend() == "tensorflow" else nullcontext():
            optimizer.build(model.trainable_variables)
    for name, own in _own_optimizers(model).items():
        if not own.built:  # which variables it trains is in `train_step`
            raise InvalidRequest(
                f"the optimizer {name} of the model is not built",
                f"Call model.{name}.build() with the variables that it trains, so that its state has a place",
            )
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
        found: Mapping[str, Any] = restored.values[item]
        problems += [f"{item}/{name} is on one side only" for name in sorted(found.keys() ^ live[item].keys())]
        for name in found.keys() & live[item].keys():
            whole = [(live[item][name], found[name])]
            for variable, value in _by_replica(model, *whole[0]) if item == METRICS else whole:
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
    optimizer = getattr(model, "optimizer", None)
    slots = {} if optimizer is None else _slots(model, optimizer)
    for attribute, own in _own_optimizers(model).items():
        slots |= {f"{attribute}/{name}": one for name, one in _slots(model, own).items()}
    return {WEIGHTS: _named(weights, f"{model.name}/"), OPTIMIZER: slots, SEEDS: seeds, METRICS: _named(metrics)}


def _slots(model: Any, optimizer: Any) -> dict[str, Any]:
    return _named(optimizer.variables, f"{optimizer.name}/", f"{model.name}_")


def _own_optimizers(model: Any) -> dict[str, Any]:
    """Those that are attributes of a model with a `train_step` of its own, such as the two of a GAN, by attribute."""
    compiled = getattr(model, "optimizer", None)
    known = {id(compiled), id(getattr(compiled, "inner_optimizer", None))}
    found = {id(one): (name, one) for name, one in vars(model).items() if isinstance(one, keras.optimizers.Optimizer)}
    return dict(pair for number, pair in found.items() if number not in known)


def _named(found: Iterable[Any], *prefixes: str) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for one in found:
        name = path = reduce(str.removeprefix, prefixes, one.path)
        count = 1
        while name in named:
            count += 1
            name = f"{path}#{count}"
        named[name] = one
    return named


def _leaf(model: Any, variable: Any) -> Any:
    """What a save copies: of TensorFlow a copy already, of torch and JAX the live memory."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        summands = _summands(model, variable)
        return np.stack([one.numpy() for one in summands]) if summands else np.asarray(variable.numpy())
    return variable.value.detach() if backend == "torch" else variable.value


def _by_replica(model: Any, variable: Any, value: Any) -> list[tuple[Any, Any]]:
    """What to assign to the variables of which a metric consists, if the checkpoint has that of each replica."""
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
    """What the chief restores, on all workers."""
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
