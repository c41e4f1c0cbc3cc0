"""Planning: match a checkpoint with the state to restore, entry by entry. Does not change live state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ckpt.capture.rng import load_rng_state
from ckpt.capture.train_state import GRADIENTS, RNG, Resumable, Stateful, TrainState
from ckpt.lazily import prefers_torch
from ckpt.restoring.host_destinations import HostDestinations
from ckpt.restoring.jax_arrays import has_templates, plan_arrays
from ckpt.restoring.plan import RestorePlan
from ckptstore.format.documents import JSON, Content
from ckptstore.format.trees import in_types_of, merge_trees


def plan_restore(content: Content, local: Mapping[str, JSON], state: TrainState) -> RestorePlan:
    """The plan for one rank. local: the rank's own items, without items that must not be used."""
    plan = RestorePlan(make_destinations(content))
    trees = dict(content.trees)
    for item, tree in local.items():
        trees[item] = merge_trees(trees[item], tree, item) if item in trees else tree
    if state.modules or state.optimizers:
        from ckpt.restoring.objects import plan_objects  # loads torch

        plan_objects(plan, trees, state)
    others = state.others_among(trees)
    for item, value in others.items():
        if plan.has(trees, item):
            _plan_extra(plan, item, value, trees[item])
    if RNG in trees:
        plan.restore_rng = partial(load_rng_state, plan.destinations.decode(trees[RNG], RNG))
    plan.items = sorted(trees)
    wanted = {*state.modules, *state.optimizers, *others, GRADIENTS, RNG}
    plan.unused = sorted(trees.keys() - wanted)
    return plan


def make_destinations(content: Content) -> HostDestinations:
    """Where the entries go: tensors and arrays, or arrays alone."""
    if not prefers_torch():
        return HostDestinations(content)
    from ckpt.restoring.destinations import Destinations  # loads torch

    return Destinations(content)


def _plan_extra(plan: RestorePlan, item: str, value: Any, tree: JSON) -> None:
    if not isinstance(value, Stateful) and has_templates(value):
        plan_arrays(plan, item, value, tree)
        return
    if not isinstance(value, Stateful):
        decoded, filled = plan.destinations.refill(tree, item, value)
        plan.overwritten.update(filled)
        plan.values[item] = in_types_of(value, decoded)
        return
    decoded = plan.destinations.decode(tree, item)
    if isinstance(value, Resumable):
        value.check_state_dicts([decoded])
    plan.finish.append(partial(value.load_state_dict, decoded))
