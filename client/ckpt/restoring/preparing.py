"""Prepare: everything of one restore that comes before its bytes, on one rank. Changes nothing that is live.

The checkpoint is matched with the state to restore, entry by entry.

The steps run in order. Whether the checkpoint fits is known when the ranks have exchanged their `fit`: an entry without
a destination on one rank may have one on another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt.capture.collector import RANK_PREFIX, rank_prefix
from ckpt.capture.rng import RngOnce, derive_rng_state, load_rng_state
from ckpt.capture.train_state import GRADIENTS, RNG, Resumable, Stateful, TrainState
from ckpt.lazily import prefers_torch
from ckpt.ranks.world import World
from ckpt.restoring.fetching import Fetcher
from ckpt.restoring.host_destinations import HostDestinations
from ckpt.restoring.jax_arrays import has_templates, plan_arrays
from ckpt.restoring.plan import RankState, RestorePlan, Surgery, share_out
from ckptstore.format.documents import JSON, REPLICAS, Content, Manifest
from ckptstore.format.trees import in_types_of, merge_trees
from ckptstore.reading.assets import ASSETS
from ckptstore.reading.source import Source, read_all_local, read_local

logger = logging.getLogger(__name__)


@dataclass
class PreparedRestore:
    """One checkpoint for the objects of this rank.

    `manifest` and `plan` are there after the steps that make them.
    """

    _source: Source
    _fetcher: Fetcher
    _state: TrainState
    _rng: bool
    """Whether random state is put back, too."""
    _surgery: Surgery
    rank_state: RankState | None = None
    """None until the items of this rank are known."""
    states: Sequence[dict[str, JSON]] = ()
    """The items of all saved ranks, on rank 0 and under another world size."""
    _own = RANK_PREFIX
    """Begins the entries that this rank had for itself, if it is the same rank."""

    def read_manifest(self) -> None:
        """Raises Damaged, ObjectMissing, Unavailable or RankLost."""
        self.manifest = self._fetcher.manifest()

    def read_items(self, world: World) -> None:
        """The items of this rank. Under another world size rank 0 reads all items, for every rank."""
        checkpoint = self._fetcher.checkpoint
        if self.manifest.world_size == world.size:
            self.rank_state = RankState(read_local(self._source, checkpoint, self.manifest, world.rank))
            self._own = rank_prefix(world.rank)
        elif world.rank == 0:
            self.states = read_all_local(self._source, checkpoint, self.manifest)

    def share_out(self, states: Sequence[dict[str, JSON]], world: World, strict: bool) -> None:
        """This rank's part of the items of all saved ranks. Raises StateMismatch."""
        others = self._state.others_among(states[0])
        self.rank_state = share_out(states, world.rank, world.size, others, strict)
        if world.rank == 0:
            notes = list(self.rank_state.notes)
            entries = self.manifest.content.entries.name
            if own := {one.partition("/")[2] for one in entries if one.startswith(RANK_PREFIX)}.intersection(entries):
                notes.append(f"each rank had its own {', '.join(sorted(own))}: the lowest rank's are restored")
            for note in notes:
                logger.warning("%s: %s", self._fetcher.checkpoint.id, note)

    def plan_reads(self) -> None:
        """Match, plan and allocate; does nothing before the items of this rank are known."""
        if (rank_state := self.rank_state) is None:
            return
        others = self._state.others
        plan = plan_restore(self.manifest, rank_state.items, self._state, self._own, self._surgery)
        plan.notes = rank_state.notes
        for item, trees in rank_state.redistributed.items():
            value, states = others[item], [plan.destinations.decode(tree, item) for tree in trees]
            if isinstance(value, Resumable):
                value.check_state_dicts(states)
            plan.finish.append(partial(value.load_state_dicts, states))
            plan.missing.remove(item)
        if rank_state.seed is not None:
            plan.restore_rng = partial(derive_rng_state, rank_state.seed)
        if self._rng:
            plan.finish.append(lambda: restore_rng(plan.restore_rng, others.values()))
        plan.mismatched += plan.destinations.clashes(self._source, self._fetcher.checkpoint)
        plan.destinations.allocate()
        self.plan = plan


def restore_rng(restore: Callable[[], None] | None, loaders: Iterable[object]) -> None:
    """Put random state back, if there is any: now, and where a loader is in mid-epoch again when it has reached its
    position. loaders: and other objects, which are left alone."""
    if restore is None:
        return
    restore()
    once = RngOnce(restore)
    for loader in loaders:
        if isinstance(loader, Resumable):
            loader.restore_rng_at_position(once)


def plan_restore(
    manifest: Manifest, local: Mapping[str, JSON], state: TrainState, prefix: str, surgery: Surgery
) -> RestorePlan:
    """The plan for one rank. local: the rank's own items, without items that must not be used. prefix: begins its own
    entries."""
    content, plan = manifest.content, RestorePlan(make_destinations(manifest.content), surgery=surgery)
    plan.own = {name.removeprefix(prefix): name for name in content.entries.name if name.startswith(prefix)}
    plan.unchecked = manifest.world_size > 1 and manifest.step > 0 and REPLICAS not in manifest.extensions
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
    wanted = {*state.modules, *state.optimizers, *others, GRADIENTS, RNG, *({ASSETS} - local.keys())}
    plan.unused = sorted(trees.keys() - wanted)
    return plan


def make_destinations(content: Content) -> HostDestinations:
    """Where the entries go: tensors and arrays, or arrays alone."""
    if not prefers_torch():
        return HostDestinations(content)
    from ckpt.restoring.destinations import Destinations  # loads torch

    return Destinations(content)


def _plan_extra(plan: RestorePlan, item: str, value: Any, tree: JSON) -> None:
    if isinstance(value, Stateful):
        decoded = plan.destinations.decode(tree, item)
        if isinstance(value, Resumable):
            value.check_state_dicts([decoded])
        plan.finish.append(partial(value.load_state_dict, decoded))
    elif has_templates(value):
        plan_arrays(plan, item, value, tree)
    else:
        decoded, filled = plan.destinations.refill(tree, item, value)
        plan.overwritten.update(filled)
        plan.values[item] = in_types_of(value, decoded)
