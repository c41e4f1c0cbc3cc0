"""SaveRequest and Snapshot: one save from capture until it is submitted to the saver."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from ckpt.capture.leaves import Captured
from ckpt.saver.messages import SaveJob
from ckpt.snapshot.arena import ArenaSlot
from ckpt.snapshot.handle import HandleUpdates
from ckpt.snapshot.stage import SnapshotLayout
from ckptstore.commits.generations import NewAttempt
from ckptstore.format.records import SAVE_COST, SaveCost

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """The state and metadata of one save."""

    attempt: NewAttempt
    captured: Captured
    layout: SnapshotLayout
    metrics: Mapping[str, float]
    lease: str | None
    """A lease to release once this save is committed."""
    cost_before: SaveCost | None = None
    """What the save before this one cost."""


def finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The finite metrics: a diverged loss must not lose the checkpoint."""
    numbers = {name: float(value) for name, value in (metrics or {}).items()}
    kept = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if len(kept) < len(numbers):
        logger.warning("metrics that are not finite are not kept: %s", sorted(numbers.keys() - kept.keys()))
    return kept


class Snapshot:
    """One save and its slot, until the saver has all of it. Used by one thread at a time."""

    def __init__(
        self, number: int, request: SaveRequest, slot: ArenaSlot | None, created_at: float, updates: HandleUpdates
    ) -> None:
        """slot: None if this rank has no shard."""
        self.number = number
        self.attempt = request.attempt
        self.slot = slot
        self.updates = updates
        self._created_at = created_at
        self._request: SaveRequest | None = request

    @property
    def request(self) -> SaveRequest:
        """The request; not available after `release`."""
        assert self._request is not None
        return self._request

    def job(self) -> SaveJob:
        """The message to the saver. Encodes the state that is not in tensors, so call it off the training thread if
        possible."""
        request = self.request
        return SaveJob(
            number=self.number,
            slot=self.slot.number if self.slot is not None else None,
            attempt=self.attempt,
            created_at=self._created_at,
            slices=request.layout.rows,
            aliases=request.captured.aliases,
            trees=request.captured.trees,
            local=request.captured.write(),
            metrics=dict(request.metrics),
            extensions={SAVE_COST: msgspec.to_builtins(cost)} if (cost := request.cost_before) is not None else {},
            lease=request.lease,
        )

    def release(self) -> None:
        """Release the captured tensors; the copy is complete."""
        self._request = None
