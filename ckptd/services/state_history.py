"""Statistics of tensors for the pages: how a run developed, and what changed between two of its checkpoints.

Reads documents only, never the data of a checkpoint, and of few checkpoints at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest
from ckptstore.reading.difference import Side, Unequal, unequal
from ckptstore.reading.history import RunFinding, first_trouble, series
from ckptstore.reading.source import StoreSource
from ckptstore.reading.statistics import CheckpointStatistics, read_statistics

MOST_CHECKPOINTS = 60
"""Checkpoints whose statistics one page reads."""
_MOST_DOCUMENTS = 1000
_MOST_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Development:
    """The statistics of the newest checkpoints of a run, oldest first."""

    steps: Sequence[CheckpointStatistics]
    finding: RunFinding


class StateHistory:
    """Reads statistics. Any thread may use it."""

    def __init__(self, source: StoreSource) -> None:
        self._source = source

    def of_run(self, run: str, checkpoints: Sequence[Checkpoint]) -> Development:
        """How the newest of these checkpoints developed. Raises NoCheckpoint or Unavailable."""
        live = [c for c in checkpoints if c.state is State.COMMITTED and c.manifest_bytes <= _MOST_MANIFEST_BYTES]
        newest = sorted(live, key=lambda c: c.attempt)[-MOST_CHECKPOINTS:]
        shards = max((c.num_shards for c in newest), default=1)
        newest = newest[-max(2, _MOST_DOCUMENTS // max(1, shards)) :]
        steps, skipped = series(self._source, run, newest)
        return Development(steps, first_trouble(run, steps, skipped))

    def of_checkpoint(self, checkpoint: Checkpoint) -> CheckpointStatistics:
        """The statistics of one checkpoint. Raises InvalidRequest, Damaged, ObjectMissing or Unavailable."""
        _check_size(checkpoint)
        return read_statistics(self._source, checkpoint)

    def unequal(self, before: Checkpoint, after: Checkpoint) -> Unequal:
        """The tensors that differ, by the checksums of their chunks. Raises as `of_checkpoint` does."""
        _check_size(before)
        _check_size(after)
        return unequal(Side.open(self._source, before), Side.open(self._source, after))


def _check_size(checkpoint: Checkpoint) -> None:
    if checkpoint.manifest_bytes > _MOST_MANIFEST_BYTES or checkpoint.num_shards > _MOST_DOCUMENTS:
        raise InvalidRequest(
            f"{checkpoint.id} is too large to draw", f"ckptctl stats {checkpoint.id} shows all of its tensors"
        )
