"""JAX: the state of a loop, such as flax modules and the states of optax, or any other pytree, by name.

    from ckpt.integrations.jax import restore, steps

    state, start = restore(state)
    for step in steps(lambda: state, start, 1000):
        state, loss = train_step(state, batch(step))

A leaf has the name of its path: `state.params["Dense_0"]["kernel"]` is the entry `state/params/Dense_0/kernel`. Fields
that JAX does not know as leaves (functions, optimizers, graph definitions) are not saved: the program makes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ckpt import default
from ckpt.checkpointer import Checkpointer
from ckpt.loop import Steps, refill
from ckpt.schedule import Schedule
from ckpt.snapshot.handle import SaveHandle
from ckptstore.errors import InvalidRequest, StateMismatch

ITEM = "state"
"""The shared item of a checkpoint that holds the state."""


def save_async(state: Any, step: int, *, checkpointer: Checkpointer | None = None, **options: Any) -> SaveHandle:
    """Save a pytree as the item `state`; it is copied on return, so that its arrays may be donated then.

    Every process calls it with the same step, and writes what its devices hold; of equal replicas one is written.
    Arrays that each process has alone are those of process 0. checkpointer: by default that of `ckpt.init`. options: as
    for `ckpt.save_async`, such as `metrics`, and extras per process. Raises what that raises.
    """
    target = checkpointer or default.current()
    shared = {ITEM: named(state), **options.pop("shared", {})}
    return target.save_async(None, None, step, shared=shared, **options)


def restore(state: Any, *, checkpointer: Checkpointer | None = None, **options: Any) -> tuple[Any, int]:
    """The state of the newest usable checkpoint, and the step to continue with: the state as given and 0 if there is
    none.

    state: the state as the program starts with it, or its `jax.eval_shape` with shardings. Every array comes back with
    the sharding it has here; the mesh and the number of processes may be others than at the save. A collective of all
    processes. options: as for `ckpt.restore`, such as `checkpoint` and `strict`; extras that are dicts, lists or
    dataclasses are filled. Raises StateMismatch if a leaf is missing, left over, or has another shape or type.
    """
    target = checkpointer or default.current()
    shared = {ITEM: named(state), **options.pop("shared", {})}
    restored = target.restore(shared=shared, **options)
    if restored is None:
        return state, 0
    refill(restored, {**options, "shared": {name: value for name, value in shared.items() if name != ITEM}})
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    try:
        leaves = [_at(restored.values[ITEM], path) for path, _ in paths]
    except (KeyError, TypeError) as error:
        raise StateMismatch(
            f"{restored.id} does not have {ITEM}/{error.args[0]}", "Build the state as it was saved"
        ) from error
    return jax.tree_util.tree_unflatten(tree, leaves), restored.step + 1


def steps(
    state: Callable[[], Any],
    start: int,
    num_steps: int,
    *,
    schedule: Schedule | int | None = None,
    checkpointer: Checkpointer | None = None,
    **options: Any,
) -> Steps:
    """The steps from `start` to `num_steps`; saves after those that are due and the last one, as `ckpt.steps` does.

    state: returns the state as it is: `lambda: state`. start: from `restore`. options: as for `save_async`.
    """
    target = checkpointer or default.current()
    return Steps(
        target,
        lambda step: save_async(state(), step, checkpointer=target, **options),
        schedule,
        start - 1,
        None,
        num_steps,
    )


def named(state: Any) -> dict[str, Any]:
    """The leaves of a pytree in nested dicts, by the names of their paths. Raises InvalidRequest for equal names."""
    root: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        *above, last = map(_name, path) if path else ("value",)
        node = root
        for name in above:
            node = node.setdefault(name, {})
        if last in node:
            raise InvalidRequest(
                f"two leaves have the name {'/'.join([*above, last])!r}", "Use keys that differ as strings"
            )
        node[last] = leaf
    return root


def _at(values: Any, path: Any) -> Any:
    for key in path or ("value",):
        values = values[_name(key)]
    return values


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
