"""Restoring arrays of JAX: each process reads the boxes that its devices hold, under the sharding of a template.

Loaded only in processes that have loaded JAX. Its arrays cannot be filled in place: new ones are made at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ckpt.capture.arrays import Array, box_of, is_array, is_key, is_template, loaded_jax, numpy_type, slices_of
from ckpt.restoring.host_destinations import inline_array
from ckpt.restoring.plan import RestorePlan
from ckptstore.format.boxes import Box, whole
from ckptstore.format.documents import JSON
from ckptstore.format.trees import TAG, decode_tree, in_types_of, value_leaves


def has_templates(value: Any) -> bool:
    """Whether a value holds arrays of JAX, or descriptions of them."""
    return loaded_jax() is not None and any(is_template(leaf) for _, leaf in value_leaves(value, ""))


def plan_arrays(plan: RestorePlan, item: str, template: Any, tree: JSON) -> None:
    """Add an item to the plan whose template holds arrays of JAX. Its value is made at the end of the restore.

    Arrays without a template come back as arrays of numpy.
    """
    destinations, found = plan.destinations, set[str]()
    wanted = {path: leaf for path, leaf in value_leaves(template, item) if is_template(leaf) or is_array(leaf)}
    makers: list[Callable[[], Any]] = []

    def decode(array: Callable[[str, dict[str, Any]], Any]) -> Any:
        def unleaf(at: str, leaf: dict[str, Any]) -> Any:
            return array(at, leaf) if leaf[TAG] in ("tensor", "array") else destinations.small(at, leaf)

        return decode_tree(tree, item, unleaf)

    def plan_leaf(at: str, leaf: dict[str, Any]) -> None:
        found.add(at)
        if at not in wanted:
            plan.unexpected.append(at)
        make = _plan_array(plan, at, leaf, wanted[at]) if is_template(wanted.get(at)) else None
        if make is None:
            array = destinations.array_of(at, leaf)
            make = lambda: array  # noqa: E731
        makers.append(make)

    def finish() -> None:
        left = iter(makers)  # a tree is decoded in the same order each time
        plan.values[item] = in_types_of(template, decode(lambda *_: next(left)()))

    decode(plan_leaf)
    plan.missing += [path for path in wanted if path not in found]
    plan.finish.append(finish)


def _plan_array(plan: RestorePlan, path: str, leaf: dict[str, Any], template: Any) -> Callable[[], Any] | None:
    """Makes the array for a template at the end; None if it does not fit."""
    destinations, small = plan.destinations, None if "name" in leaf else inline_array(path, leaf)
    dtype, saved = destinations.entry(leaf["name"]) if small is None else (leaf["dtype"], small.shape)
    keys, shape = is_key(template), tuple(template.shape)
    shape += saved[len(shape) :] if keys else ()
    if keys != ("key" in leaf):
        plan.mismatched.append(f"{path}: typed keys of random numbers on one side only")
        return None
    if shape != saved:
        plan.mismatched.append(f"{path}: {list(saved)} in the checkpoint, {list(shape)} here")
        return None
    if not keys and template.dtype.name != dtype:
        plan.mismatched.append(f"{path}: {dtype} in the checkpoint, {template.dtype.name} here")
    placed = _index_map(template, shape)
    parts = {
        box: destinations.new_array(leaf["name"], box) if small is None else np.array(small[slices_of(box)], order="C")
        for box in dict.fromkeys(box for _, box in placed)
    }
    return partial(_assemble, template, shape, placed, parts, leaf.get("key"))


def _index_map(template: Any, shape: tuple[int, ...]) -> list[tuple[Any, Box]]:
    """The devices of this process that hold parts of an array, each with its box; None: where JAX puts new arrays."""
    sharding = getattr(template, "sharding", None)
    if sharding is None or not getattr(template, "committed", True):
        return [(None, whole(shape))]
    indices = sharding.addressable_devices_indices_map(shape)
    return [(device, box_of(index, shape)) for device, index in indices.items()]


def _assemble(
    template: Any, shape: tuple[int, ...], placed: list[tuple[Any, Box]], parts: dict[Box, Array], key: str | None
) -> Any:
    """The array of JAX, once its elements are here. Its memory is JAX's own, so that it can be donated."""
    jax: Any = loaded_jax()
    if key is None and (wanted := numpy_type(template.dtype.name)) != next(iter(parts.values())).dtype:
        parts = {box: part.astype(wanted) for box, part in parts.items()}
    if placed[0][0] is None:
        array = jax.device_put(parts[placed[0][1]], may_alias=False)
    else:
        sharding = template.sharding
        place = partial(jax.sharding.SingleDeviceSharding, memory_kind=sharding.memory_kind)
        here = [jax.device_put(parts[box], place(device), may_alias=False) for device, box in placed]
        array = jax.make_array_from_single_device_arrays(shape, sharding, here)
    return array if key is None else jax.random.wrap_key_data(array, impl=key)
