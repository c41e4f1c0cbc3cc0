"""The restore pipeline, run by all ranks together: resolve, plan, fetch and decode, place."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from ckpt.capture.rng import derive_rng_state
from ckpt.capture.train_state import Resumable, TrainState
from ckpt.capture.values import check_others
from ckpt.config import Config
from ckpt.ranks.world import World
from ckpt.restoring.fetching import Fetcher, is_near
from ckpt.restoring.jax_arrays import has_templates
from ckpt.restoring.plan import RestorePlan, require_fit, require_refilled
from ckpt.restoring.planning import plan_restore
from ckpt.restoring.prefetching import Prefetch
from ckpt.restoring.ranks import RankState, share_out
from ckpt.restoring.resolve import (
    candidates,
    newest_far_generation,
    note_damage,
    note_restored,
    release_lease,
    wait_for_orphan_saver,
)
from ckpt.restoring.session import RestoreSession
from ckptapi.bodies import CheckpointBody, Phase
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    NoCheckpoint,
    ObjectMissing,
    RankLost,
    RestoreFailed,
    StateMismatch,
    error_from_code,
)
from ckptstore.format.documents import JSON, Manifest
from ckptstore.format.planning import ShardRead, plan_reads
from ckptstore.names import Reference, new_ulid
from ckptstore.reading.source import Source, read_all_local, read_local

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_MIXTURE = (
    "The objects given to restore may hold a mixture of checkpoints and must not be trained on: build them again, and "
    "restore a checkpoint that fits them"
)
_TRY_NEXT = (CorruptObject, ObjectMissing, NoCheckpoint)


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore."""

    checkpoint: Checkpoint
    values: dict[str, Any]
    """Plain data that was requested by keyword."""
    skipped: list[tuple[str, str]]
    """Newer checkpoints that could not be used: id and reason."""
    missing: list[str]
    unexpected: list[str]
    mismatched: list[str]
    unused: list[str]
    """Items of the checkpoint that the caller did not request."""
    notes: list[str]
    """How per-rank state was redistributed, if the number of ranks has changed."""
    seconds: float
    lease: str | None = field(repr=False)
    read: dict[str, int] = field(default_factory=dict)
    """Raw bytes that this rank placed, by where they were read: `store`, and what is nearer. Replicas that another rank
    read count as read from the store."""
    rng: Callable[[], None] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        size = human.size(self.checkpoint.raw_bytes)
        skipped = f", {human.count(len(self.skipped), 'newer checkpoint')} skipped" if self.skipped else ""
        return f"{self.id}, {size} in {self.seconds:.2f} s{skipped}"

    @property
    def id(self) -> str:
        """run@step.ulid."""
        return self.checkpoint.id

    @property
    def step(self) -> int:
        """The step of the restored state; training continues with the next one."""
        return self.checkpoint.step

    @property
    def metrics(self) -> dict[str, float]:
        """As given to save_async."""
        return self.checkpoint.metrics

    def restore_rng(self) -> None:
        """Put the random state of the checkpoint back: after `restore(..., rng=False)`, or once more.

        Call it last, in the training thread: before the first step, after all else that draws random numbers. Without
        random state in the checkpoint (an imported one) it does nothing.
        """
        if self.rng is not None:
            self.rng()


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector of the process; reference counting goes on.

    A restore creates objects for every tensor and chunk, none of which is garbage before its end. Used as a decorator,
    it also frees them before collection resumes. A collector that was disabled before stays disabled.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Restorer:
    """One restore, the same on every rank of the world."""

    def __init__(self, source: Source, config: Config, world: World, prefetch: Prefetch | None = None) -> None:
        """prefetch: what this rank has begun to read, perhaps of another checkpoint."""
        self._source = source
        self._prefetch = prefetch
        self._config = config
        self._world = world
        self.trains = False
        """Whether any rank restores an optimizer or arrays of JAX, and so will save. Equal on all; set by `restore`."""
        self.seen = 0
        """The newest generation of the far store, if there is a near one. Equal on all ranks; set by `restore`."""
        self._rng = True
        self._near = False  # the store is on this host, for all ranks
        self._begun: list[str] = []
        """Ids of the checkpoints whose bytes may have been placed."""
        self._overwritten: set[str] = set()

    @gc_paused()
    def restore(self, state: TrainState, reference: Reference, strict: bool, rng: bool = True) -> Restored | None:
        """Restore the newest usable checkpoint, or the named one; None if the run has none. rng: also random state.

        Raises the errors of `Checkpointer.restore`, on every rank.
        """
        started = time.perf_counter()
        self._rng = rng
        self.trains, self._near = self._begin(state)
        found = candidates(self._source, self._config, reference) if self._world.rank == 0 else iter(())
        skipped: list[tuple[str, str]] = []
        while (checkpoint := self._next(found)) is not None:
            try:
                plan, rank_state, lease = self._try(state, checkpoint, strict)
            except _TRY_NEXT as error:
                if self._world.rank == 0:
                    note_damage(self._source, checkpoint, error, lambda _: self._world.beat())
                if reference.step is not None:
                    raise
                logger.error("cannot restore %s: %s; trying the checkpoint before it", checkpoint.id, error)
                skipped.append((checkpoint.id, str(error)))
                continue
            except StateMismatch as error:
                if not self._begun:
                    raise
                raise self._mixture(checkpoint, error) from error
            seconds = time.perf_counter() - started
            note_restored(self._source, self._config)
            restored = Restored(
                checkpoint=checkpoint, values=plan.values, skipped=skipped, missing=plan.missing,
                unexpected=plan.unexpected, mismatched=plan.mismatched, unused=plan.unused,
                notes=list(rank_state.notes), seconds=seconds, lease=lease, read=plan.read, rng=plan.restore_rng,
            )  # fmt: skip
            if self._world.rank == 0:
                logger.info("restored %s", restored)
            return restored
        if skipped:
            raise CorruptObject(
                f"none of the {len(skipped)} checkpoints of run {reference.run!r} can be restored; the newest, "
                f"{skipped[0][0]}: {skipped[0][1]}",
                _MIXTURE if self._begun else "Nothing was changed",
            )
        return None

    def _mixture(self, checkpoint: Checkpoint, error: StateMismatch) -> CorruptObject:
        """The error for an older checkpoint that does not fit, after bytes of a damaged one were placed."""
        damaged = ", ".join(self._begun)
        return CorruptObject(
            f"{damaged} cannot be read to the end, and {checkpoint.id} before it does not fit: {error.message}",
            _MIXTURE,
        )

    def _begin(self, state: TrainState) -> tuple[bool, bool]:
        """Wait for orphaned savers on all hosts. Returns whether any rank restores training state, and whether the
        store is on the host of each rank: then it is the same host.

        Raises UnsupportedObject for an extra that a later save would refuse.
        """

        def work() -> tuple[bool, bool]:
            if not self._config.read_only:
                check_others(state)
            wait_for_orphan_saver(self._config)
            arrays = not state.modules and any(map(has_templates, state.others.values()))
            return bool(state.optimizers) or arrays, is_near(self._source)

        _, answers = self._together(work, report=_itself)
        return any(trains for trains, _ in answers), all(near for _, near in answers)

    def _next(self, found: Iterator[Checkpoint]) -> Checkpoint | None:
        """Rank 0's next candidate, or its error, on all ranks."""

        def next_candidate() -> Any:
            checkpoint = next(found, None)
            body = None if checkpoint is None else msgspec.to_builtins(CheckpointBody.of(checkpoint))
            seen = newest_far_generation(self._source, self._config, checkpoint) if self._world.rank == 0 else 0
            return body, seen

        _, answers = self._together(next_candidate, report=_itself)
        body, self.seen = answers[0]
        return None if body is None else msgspec.convert(body, CheckpointBody).checkpoint()

    def _try(
        self, state: TrainState, checkpoint: Checkpoint, strict: bool
    ) -> tuple[RestorePlan, RankState, str | None]:
        """Restore one checkpoint on all ranks. The caller must release the lease, if this rank holds one."""
        session = RestoreSession(self._config, self._world.rank, self._world.size)
        leases: list[str] = []
        try:
            self._join(session, checkpoint)
            fetcher = Fetcher(self._source, self._config, self._world, checkpoint, self._prefetch, self._near)
            with fetcher.reading_ahead():
                self._together(partial(fetcher.protect, leases))
            manifest, _ = self._together(fetcher.manifest)
            rank_state = self._rank_state(state, checkpoint, manifest, strict)
            plan = self._plan(state, manifest, rank_state, strict)
            self._begun.append(checkpoint.id)
            self._overwritten |= plan.overwritten
            self._fetch(fetcher, manifest, plan, session)
            self._together(partial(self._place, plan, session))
            session.finish()
        except BaseException as error:
            session.fail(error)
            for lease in leases:
                release_lease(self._source, checkpoint.run, lease)
            raise
        return plan, rank_state, leases[0] if leases else None

    def _join(self, session: RestoreSession, checkpoint: Checkpoint) -> None:
        """Join a restore session of the daemon, if all ranks can."""
        if self._config.daemon is None:
            return
        key = self._world.broadcast(new_ulid(system_clock()))
        _, joined = self._together(partial(session.join, checkpoint, key), report=_itself)
        if not all(joined):
            session.fail(RuntimeError("not all ranks could join"))

    def _rank_state(self, state: TrainState, checkpoint: Checkpoint, manifest: Manifest, strict: bool) -> RankState:
        """The items of this rank. Under another world size rank 0 reads all items, for every rank."""
        world = self._world
        if manifest.world_size == world.size:
            local, _ = self._together(partial(read_local, self._source, checkpoint, manifest, world.rank))
            return RankState(local)

        def read() -> list[dict[str, JSON]]:
            return read_all_local(self._source, checkpoint, manifest) if world.rank == 0 else []

        _, states = self._together(read, report=_itself)
        others = state.others_among(states[0][0])
        share = partial(share_out, states[0], world.rank, world.size, others, strict)
        rank_state, _ = self._together(share)
        if world.rank == 0:
            for note in rank_state.notes:
                logger.warning("%s: %s", checkpoint.id, note)
        return rank_state

    def _plan(self, state: TrainState, manifest: Manifest, rank_state: RankState, strict: bool) -> RestorePlan:
        def work() -> RestorePlan:
            plan = plan_restore(manifest.content, rank_state.items, state)
            for item, trees in rank_state.redistributed.items():
                states = [plan.destinations.decode(tree, item) for tree in trees]
                if isinstance(state.others[item], Resumable):
                    state.others[item].check_state_dicts(states)
                plan.finish.append(partial(state.others[item].load_state_dicts, states))
                plan.missing.remove(item)
            if rank_state.seed is not None:
                plan.restore_rng = partial(derive_rng_state, rank_state.seed)
            if self._rng:
                plan.finish.append(partial(_restore_rng, state, plan))
            return plan

        plan, unexpected = self._together(work, report=lambda plan: plan.unexpected)
        # Entries without a destination here may belong to another pipeline stage.
        plan.unexpected = sorted(set[str].intersection(*map(set, unexpected)))

        def check() -> None:
            require_fit(plan, strict)
            require_refilled(plan, self._overwritten)

        self._together(check)
        return plan

    def _fetch(self, fetcher: Fetcher, manifest: Manifest, plan: RestorePlan, session: RestoreSession) -> None:
        def progress(num_bytes: int) -> None:
            self._world.beat()
            session.progress(num_bytes)

        def plan_and_allocate() -> list[ShardRead]:
            plan.destinations.allocate()
            return plan_reads(manifest.content, plan.destinations.wants())

        reads, _ = self._together(plan_and_allocate)
        total = sum(chunk.raw for read in reads for chunk in read.chunks)

        def fetch() -> None:
            with plan.destinations.receiving(reads) as buffers:
                fetcher.fetch(manifest.content, reads, buffers, progress)

        session.enter(Phase.FETCHING, total)
        try:
            self._together(fetch)
        except CorruptObject as error:
            if not fetcher.read_past_caches():
                raise
            logger.warning("reading again, bypassing the daemon's cache: %s", error)
            session.enter(Phase.FETCHING, total)
            self._together(fetch)
        plan.read = dict(fetcher.read)

    def _place(self, plan: RestorePlan, session: RestoreSession) -> None:
        session.enter(Phase.PLACING)
        plan.destinations.place()
        for step in plan.finish:
            step()
        plan.finish.clear()  # they hold the plan, which holds them

    def _together(self, work: Callable[[], _T], report: Callable[[_T], Any] | None = None) -> tuple[_T, list[Any]]:
        """Run `work` on all ranks, and gather `report` of every rank's result. Raises one rank's error on all ranks.

        If several ranks fail, an error that another checkpoint would not cure takes precedence.
        """
        error: CkptError | None = None
        result: _T | None = None
        reported = None
        try:
            result = work()
            reported = report(result) if report is not None else None
        except RankLost:
            raise
        except CkptError as caught:
            error = caught
        except Exception as caught:
            # The other ranks must not wait for a rank that will never answer.
            error = RestoreFailed(f"rank {self._world.global_rank} cannot restore: {caught!r}")
            error.__cause__ = caught
        answers = self._world.gather(
            [reported] if error is None else [error.code, error.message, error.hint, error.chunks]
        )
        errors = [
            error if rank == self._world.rank and error is not None else _error_of_rank(*answer)
            for rank, answer in enumerate(answers)
            if len(answer) > 1
        ]
        if errors:
            raise min(errors, key=lambda found: isinstance(found, _TRY_NEXT))
        return cast(_T, result), [answer[0] for answer in answers]


def _restore_rng(state: TrainState, plan: RestorePlan) -> None:
    """Put random state back: now, and where a loader is in mid-epoch again when it has reached its position."""
    if plan.restore_rng is None:
        return
    plan.restore_rng()
    for value in state.others.values():
        if isinstance(value, Resumable):
            value.restore_rng_at_position(plan.restore_rng)


def _error_of_rank(code: str, message: str, hint: str, chunks: list[tuple[str, int]]) -> CkptError:
    error = error_from_code(code, message, hint)
    error.chunks = tuple((shard, index) for shard, index in chunks)
    return error


def _itself(value: Any) -> Any:
    return value
