"""Prepare: everything of one restore that comes before its bytes, on one rank. Changes nothing that is live.

The steps run in order. Whether the checkpoint fits is known when the ranks have exchanged their `fit`: an entry without
a destination on one rank may have one on another.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from functools import partial

from ckpt.capture.rng import derive_rng_state
from ckpt.capture.train_state import Resumable, TrainState
from ckpt.ranks.world import World
from ckpt.restoring.fetching import Fetcher
from ckpt.restoring.plan import Fit, RestorePlan, fit, require_fits
from ckpt.restoring.planning import plan_restore
from ckpt.restoring.ranks import RankState, share_out
from ckptstore.format.documents import JSON, Manifest
from ckptstore.format.planning import ShardRead, plan_reads
from ckptstore.reading.source import Source, read_all_local, read_local

logger = logging.getLogger(__name__)


class PreparedRestore:
    """One checkpoint for the objects of this rank."""

    manifest: Manifest
    rank_state: RankState
    plan: RestorePlan
    reads: list[ShardRead]

    def __init__(self, source: Source, fetcher: Fetcher, state: TrainState, rng: bool) -> None:
        """rng: also put random state back."""
        self._source = source
        self._fetcher = fetcher
        self._state = state
        self._rng = rng
        self._known = False
        self.states: list[dict[str, JSON]] = []
        """The items of all saved ranks, on rank 0 and under another world size."""

    def read_manifest(self) -> None:
        """Raises Damaged, ObjectMissing, Unavailable or RankLost."""
        self.manifest = self._fetcher.manifest()

    def read_items(self, world: World) -> None:
        """The items of this rank. Under another world size rank 0 reads all items, for every rank."""
        checkpoint = self._fetcher.checkpoint
        if self.manifest.world_size == world.size:
            self._use(RankState(read_local(self._source, checkpoint, self.manifest, world.rank)))
        elif world.rank == 0:
            self.states = read_all_local(self._source, checkpoint, self.manifest)

    def share_out(self, states: Sequence[dict[str, JSON]], world: World, strict: bool) -> None:
        """This rank's part of the items of all saved ranks. Raises StateMismatch."""
        others = self._state.others_among(states[0])
        self._use(share_out(states, world.rank, world.size, others, strict))
        if world.rank == 0:
            for note in self.rank_state.notes:
                logger.warning("%s: %s", self._fetcher.checkpoint.id, note)

    def _use(self, rank_state: RankState) -> None:
        self.rank_state, self._known = rank_state, True

    def plan_reads(self) -> None:
        """Match, plan and allocate; does nothing before the items of this rank are known."""
        if not self._known:
            return
        self.plan = plan = self._planned()
        plan.destinations.allocate()
        self.reads = plan_reads(self.manifest.content, plan.destinations.wants())

    def _planned(self) -> RestorePlan:
        rank_state, others = self.rank_state, self._state.others
        plan = plan_restore(self.manifest.content, rank_state.items, self._state)
        for item, trees in rank_state.redistributed.items():
            states = [plan.destinations.decode(tree, item) for tree in trees]
            if isinstance(others[item], Resumable):
                others[item].check_state_dicts(states)
            plan.finish.append(partial(others[item].load_state_dicts, states))
            plan.missing.remove(item)
        if rank_state.seed is not None:
            plan.restore_rng = partial(derive_rng_state, rank_state.seed)
        if self._rng:
            plan.finish.append(partial(_restore_rng, self._state, plan))
        return plan

    def fit(self, overwritten: Collection[str]) -> Fit | None:
        """How the plan fits, for all ranks to know; None before there is one. overwritten: see `require_fits`."""
        return fit(self.plan, overwritten) if self._known else None

    def require(self, fits: Sequence[Fit], strict: bool) -> None:
        """Raise StateMismatch unless the checkpoint fits on every rank: the same error on all."""
        self.plan.unexpected = require_fits(fits, strict)


def _restore_rng(state: TrainState, plan: RestorePlan) -> None:
    """Put random state back: now, and where a loader is in mid-epoch again when it has reached its position."""
    if plan.restore_rng is None:
        return
    plan.restore_rng()
    for value in state.others.values():
        if isinstance(value, Resumable):
            value.restore_rng_at_position(plan.restore_rng)
