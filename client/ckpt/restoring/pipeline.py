"""The restore pipeline, run by all ranks together: resolve, plan, fetch and decode, place."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from ckpt.capture.train_state import TrainState
from ckpt.capture.values import check_others
from ckpt.config import Config
from ckpt.ranks.world import World
from ckpt.restoring.fetching import Fetcher, is_near
from ckpt.restoring.jax_arrays import has_templates
from ckpt.restoring.plan import Fit, RestorePlan
from ckpt.restoring.preparing import PreparedRestore
from ckpt.restoring.ranks import RankState
from ckpt.restoring.resolve import (
    candidates,
    newest_far_generation,
    note_damage,
    note_restored,
    release_lease,
    wait_for_orphan_saver,
)
from ckpt.restoring.session import RestoreSession
from ckpt.restoring.together import TRY_NEXT, Together
from ckptapi.bodies import CheckpointBody, Phase
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, CorruptObject, StateMismatch
from ckptstore.format.decoding import convert
from ckptstore.names import Reference, new_ulid
from ckptstore.reading.source import Source

logger = logging.getLogger(__name__)

_MIXTURE = (
    "The objects given to restore may hold a mixture of checkpoints and must not be trained on: build them again, and "
    "restore a checkpoint that fits them"
)


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

    def __init__(self, source: Source, config: Config, world: World) -> None:
        self._source = source
        self._config = config
        self._world = world
        self.trains = False
        """Whether any rank restores an optimizer or arrays of JAX, and so will save. Equal on all; set by `restore`."""
        self.seen = 0
        """The newest generation of the far store, if there is a near one. Equal on all ranks; set by `restore`."""
        self._rng = True
        self._near = False  # the store is on this host, for all ranks
        self._key = ""  # of the session at the daemon
        self._together = Together(world)
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
        found = candidates(self._source, self._config, reference) if self._world.rank == 0 else iter(())
        skipped: list[tuple[str, str]] = []
        candidate = self._begin(state, found)
        while candidate is not None:
            checkpoint = candidate.checkpoint()
            try:
                plan, rank_state, lease = self._try(state, checkpoint, strict)
            except TRY_NEXT as error:
                if self._world.rank == 0:
                    note_damage(self._source, checkpoint, error, lambda _: self._world.beat())
                if reference.step is not None:
                    raise
                logger.error("cannot restore %s: %s; trying the checkpoint before it", checkpoint.id, error)
                skipped.append((checkpoint.id, str(error)))
                candidate = self._candidate(self._together.choose(partial(self._next, found)))
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

    def _begin(self, state: TrainState, found: Iterator[Checkpoint]) -> CheckpointBody | None:
        """Wait for orphaned savers on all hosts. Then rank 0 chooses the first candidate.

        Raises UnsupportedObject for an extra that a later save would refuse.
        """

        def report() -> tuple[bool, bool]:
            arrays = not state.modules and any(map(has_templates, state.others.values()))
            return bool(state.optimizers) or arrays, is_near(self._source)

        checks = () if self._config.read_only else (partial(check_others, state),)
        steps = (*checks, partial(wait_for_orphan_saver, self._config))
        answers, chosen = self._together.do_and_choose(steps, report, partial(self._next, found))
        self.trains, self._near = any(trains for trains, _ in answers), all(near for _, near in answers)
        return self._candidate(chosen)

    def _next(self, found: Iterator[Checkpoint]) -> Any:
        """Rank 0's next candidate, the newest generation that it has seen, and a name for a session at the daemon."""
        checkpoint = next(found, None)
        body = None if checkpoint is None else msgspec.to_builtins(CheckpointBody.of(checkpoint))
        return body, newest_far_generation(self._source, self._config, checkpoint), new_ulid(system_clock())

    def _candidate(self, chosen: Any) -> CheckpointBody | None:
        body, self.seen, self._key = chosen
        return None if body is None else convert(body, CheckpointBody)

    def _try(
        self, state: TrainState, checkpoint: Checkpoint, strict: bool
    ) -> tuple[RestorePlan, RankState, str | None]:
        """Restore one checkpoint on all ranks. The caller must release the lease, if this rank holds one."""
        session = RestoreSession(self._config, self._world.rank, self._world.size)
        leases: list[str] = []
        try:
            fetcher = Fetcher(self._source, self._config, self._world, checkpoint, self._near)
            with fetcher.protecting(leases) as await_lease:
                prepared = self._prepare(state, fetcher, session, await_lease, strict)
            plan = prepared.plan
            self._begun.append(checkpoint.id)
            self._overwritten |= plan.overwritten
            self._fetch(fetcher, prepared, session)
            self._together.do(partial(self._place, plan, session))
            session.finish()
        except BaseException as error:
            session.fail(error)
            for lease in leases:
                release_lease(self._source, checkpoint.run, lease)
            raise
        return plan, prepared.rank_state, leases[0] if leases else None

    def _prepare(
        self,
        state: TrainState,
        fetcher: Fetcher,
        session: RestoreSession,
        await_lease: Callable[[], None],
        strict: bool,
    ) -> PreparedRestore:
        """Read the documents and plan; changes nothing live. One meeting; one more if ranks exchange what they read,
        and one more under another world size, where rank 0 reads the items of all ranks and shares them out.

        await_lease: see Fetcher.protecting. Raises StateMismatch if the checkpoint does not fit
        the objects of every rank.
        """
        world, prepared = self._world, PreparedRestore(self._source, fetcher, state, self._rng)
        steps: list[Callable[[], object]] = [partial(session.join, fetcher.checkpoint, self._key)]
        if fetcher.exchanges:
            # The manifest is read in a collective.
            self._together.do(*steps, partial(_unless_deleted, fetcher.read_ahead, await_lease), await_lease)
            steps = []
        reads = (prepared.read_manifest, partial(prepared.read_items, world), prepared.plan_reads)
        steps += [partial(_unless_deleted, read, await_lease) for read in reads]
        reports = self._together.do(
            *steps, await_lease, report=lambda: (session.joined, prepared.states, self._fit(prepared))
        )
        if not all(joined for joined, *_ in reports):
            session.fail(RuntimeError("not all ranks could join"))
        if prepared.manifest.world_size == world.size:
            fits = [fit for *_, fit in reports]
        else:
            share = partial(prepared.share_out, reports[0][1], world, strict)
            fits = self._together.do(share, prepared.plan_reads, report=partial(self._fit, prepared))
        prepared.require(fits, strict)
        return prepared

    def _fit(self, prepared: PreparedRestore) -> Fit | None:
        return prepared.fit(self._overwritten)

    def _fetch(self, fetcher: Fetcher, prepared: PreparedRestore, session: RestoreSession) -> None:
        def progress(num_bytes: int) -> None:
            self._world.beat()
            session.progress(num_bytes)

        content, plan, reads = prepared.manifest.content, prepared.plan, prepared.reads
        total = sum(chunk.raw for read in reads for chunk in read.chunks)

        def fetch() -> None:
            with plan.destinations.receiving(reads) as buffers:
                fetcher.fetch(content, reads, buffers, progress)

        session.enter(Phase.FETCHING, total)
        try:
            self._together.do(fetch)
        except CorruptObject as error:
            if not fetcher.read_past_caches():
                raise
            logger.warning("reading again, bypassing the daemon's cache: %s", error)
            session.enter(Phase.FETCHING, total)
            self._together.do(fetch)
        plan.read = dict(fetcher.read)

    def _place(self, plan: RestorePlan, session: RestoreSession) -> None:
        session.enter(Phase.PLACING)
        plan.destinations.place()
        for step in plan.finish:
            step()
        plan.finish.clear()  # they hold the plan, which holds them


def _unless_deleted(read: Callable[[], object], await_lease: Callable[[], None]) -> None:
    """If the checkpoint is being deleted, raise the lease's error: what is missing then is not damage."""
    try:
        read()
    except CkptError:
        await_lease()
        raise
