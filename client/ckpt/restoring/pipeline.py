"""The restore stages, joined, for all ranks together: resolve, plan, fetch and decode, place."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.capture.state import RNG, Subject
from ckpt.config import Config
from ckpt.distributed import World
from ckpt.restoring.plan import RestorePlan, plan_restore
from ckpt.restoring.resolve import candidates, settle, take_lease
from ckptstore.catalog import Checkpoint, State
from ckptstore.documents import JSON, Manifest
from ckptstore.errors import CkptError, CorruptObject, NoCheckpoint, ObjectMissing, StateMismatch
from ckptstore.names import Reference
from ckptstore.planning import plan_reads, whole_entries
from ckptstore.reading import fetch
from ckptstore.source import Source, read_manifest, read_receipt

logger = logging.getLogger(__name__)

_TRY_NEXT = (CorruptObject, ObjectMissing, NoCheckpoint)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    checkpoint: Checkpoint
    values: dict[str, Any]
    """Plain data that was asked for by keyword."""
    skipped: list[tuple[str, str]]
    """Newer checkpoints that could not be used: id and why."""
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    unused: list[str]
    """Items of the checkpoint that nobody asked for."""
    seconds: float
    lease: str | None = field(repr=False)

    @property
    def id(self) -> str:
        """run@step.ulid."""
        return self.checkpoint.id

    @property
    def step(self) -> int:
        """The step that the state is of; training goes on with the next."""
        return self.checkpoint.step

    @property
    def metrics(self) -> dict[str, float]:
        """As given to save_async."""
        return self.checkpoint.metrics


class Restorer:
    """One restore, the same on every rank of the world."""

    def __init__(self, source: Source, config: Config, world: World) -> None:
        self._source = source
        self._config = config
        self._world = world

    def restore(self, subject: Subject, reference: Reference, strict: bool) -> Restored | None:
        """Restore the newest usable checkpoint, or the named one; None if the run has none.

        Raises what `Checkpointer.restore` says, on every rank.
        """
        started = time.perf_counter()
        settle(self._config)
        self._world.gather(None)  # on all hosts
        found = candidates(self._source, self._config, reference) if self._world.rank == 0 else iter(())
        skipped: list[tuple[str, str]] = []
        while (checkpoint := self._next(found)) is not None:
            outcome = self._attempt(subject, checkpoint, strict)
            if isinstance(outcome, _Placed):
                return self._finish(checkpoint, outcome, skipped, started)
            if not isinstance(outcome, _TRY_NEXT) or reference.step is not None:
                raise outcome
            logger.error("cannot restore %s: %s; trying the checkpoint before it", checkpoint.id, outcome)
            skipped.append((checkpoint.id, str(outcome)))
        if skipped:
            raise CorruptObject(
                f"none of the {len(skipped)} checkpoints of run {reference.run!r} can be restored; the newest, "
                f"{skipped[0][0]}: {skipped[0][1]}",
                "The objects given to restore hold a mixture: build them anew before training",
            )
        return None

    def _next(self, found: Iterator[Checkpoint]) -> Checkpoint | None:
        """Rank 0's next candidate, or its error, on all ranks."""
        answer: Checkpoint | CkptError | None = None
        if self._world.rank == 0:
            try:
                answer = next(found, None)
            except CkptError as error:
                answer = error
        answer = self._world.broadcast(answer)
        if isinstance(answer, CkptError):
            raise answer
        return answer

    def _attempt(self, subject: Subject, checkpoint: Checkpoint, strict: bool) -> _Placed | CkptError:
        """Try on all ranks; the first rank's error is every rank's."""
        placed: _Placed | None = None
        error: CkptError | None = None
        try:
            placed = self._place(subject, checkpoint, strict)
        except CkptError as caught:
            error = caught
        except Exception as caught:
            # The others must not wait for a rank that will never answer.
            self._world.gather(CkptError(f"rank {self._world.rank} cannot restore: {caught!r}"))
            raise
        errors: list[CkptError] = [found for found in self._world.gather(error) if found is not None]
        if placed is not None and not errors:
            return placed
        if placed is not None and placed.lease is not None:
            self._source.release_lease(checkpoint.run, placed.lease)
        # Something that no other checkpoint would cure outweighs damage to this one.
        return min(errors, key=lambda found: isinstance(found, _TRY_NEXT))

    def _place(self, subject: Subject, checkpoint: Checkpoint, strict: bool) -> _Placed:
        if checkpoint.state is State.CORRUPT:
            raise CorruptObject(checkpoint.problem)
        lease = take_lease(self._source, checkpoint) if self._world.rank == 0 else None
        try:
            manifest = read_manifest(self._source, checkpoint)
            local = self._local_items(checkpoint, manifest, strict)
            plan = plan_restore(manifest.content, local, subject, strict)
            reads = plan_reads(manifest.content, whole_entries(plan.destinations.names))
            fetch(self._source, checkpoint, reads, plan.destinations.buffers())
        except BaseException:
            if lease is not None:
                self._source.release_lease(checkpoint.run, lease)
            raise
        return _Placed(plan, lease)

    def _local_items(self, checkpoint: Checkpoint, manifest: Manifest, strict: bool) -> Mapping[str, JSON]:
        """The items of this rank; under another world size those that no rank had differently."""
        world = self._world
        if manifest.world_size == world.size:
            return read_receipt(self._source, checkpoint, manifest, world.rank).local
        ranks = range(manifest.world_size)
        locals_ = [read_receipt(self._source, checkpoint, manifest, rank).local for rank in ranks]
        own = locals_[world.rank % manifest.world_size]
        same = {item: tree for item, tree in own.items() if all(other.get(item) == tree for other in locals_)}
        different = sorted(own.keys() - same.keys() - {RNG})
        change = f"{checkpoint.id} was saved by {manifest.world_size} ranks and is restored by {world.size}"
        if different and strict:
            raise StateMismatch(
                f"{change}, and {', '.join(different)} differed between ranks",
                "Pass strict=False to give each rank the state of rank (own rank modulo saved ranks)",
            )
        logger.warning("%s: random numbers go on from each rank's present generators", change)
        return {item: tree for item, tree in own.items() if item != RNG} if not strict else same

    def _finish(
        self, checkpoint: Checkpoint, placed: _Placed, skipped: list[tuple[str, str]], started: float
    ) -> Restored:
        plan = placed.plan
        plan.destinations.place()
        for step in plan.finish:
            step()
        seconds = time.perf_counter() - started
        logger.info("restored %s: %.1f MB in %.2f s", checkpoint.id, checkpoint.raw_bytes / 1e6, seconds)
        return Restored(
            checkpoint=checkpoint,
            values=plan.values,
            skipped=skipped,
            missing=plan.missing,
            unexpected=plan.unexpected,
            mismatched=plan.mismatched,
            unused=plan.unused,
            seconds=seconds,
            lease=placed.lease,
        )


@dataclass(frozen=True, slots=True)
class _Placed:
    """All bytes are fetched and checked."""

    plan: RestorePlan
    lease: str | None
