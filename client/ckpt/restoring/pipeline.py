"""The restore pipeline, run by all ranks together: resolve, plan, fetch and decode, place; whole or in stages."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ckpt.capture.train_state import MODEL, TrainState
from ckpt.capture.values import check_others
from ckpt.config import Config
from ckpt.ranks.world import World
from ckpt.restoring.fetching import Fetcher, is_local
from ckpt.restoring.jax_arrays import has_templates
from ckpt.restoring.plan import Differences, RestoreFit, RestorePlan, Surgery, require_fits
from ckpt.restoring.preparing import PreparedRestore, make_destinations, restore_rng
from ckpt.restoring.resolve import (
    candidates,
    leased,
    nearest_full,
    newest_remote_generation,
    note_damage,
    note_restored,
    noting_damage,
    release_lease,
    wait_for_orphan_saver,
)
from ckpt.restoring.session import RestoreSession
from ckptapi.bodies import Phase
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    InvalidRequest,
    NoCheckpoint,
    ObjectMissing,
    RankLost,
    RestoreFailed,
    StateMismatch,
    Thinned,
    error_from_code,
)
from ckptstore.format.decoding import convert
from ckptstore.names import Reference, new_ulid
from ckptstore.reading.fetch import raw_bytes
from ckptstore.reading.source import Source, read_manifest

if TYPE_CHECKING:
    from ckpt.capture.train_state import Model, Optimizers

logger = logging.getLogger(__name__)

_NAMED = 3
_MIXTURE = (
    "The objects given to restore may hold a mixture of checkpoints and must not be trained on: build them again, and "
    "restore a checkpoint that fits them"
)


Steps = tuple[Callable[[], object], ...]
"""Parts of the work between two meetings of the ranks."""


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
    lease: str | None
    read: dict[str, int]
    """Raw bytes that this rank placed, by where they were read: `store`, and what is nearer. Replicas that another rank
    read count as read from the store."""
    rng: Callable[[], None] | None
    differences: Differences
    """The table of what did not match on this rank."""

    def __str__(self) -> str:
        size = human.size(self.checkpoint.raw_bytes)
        skipped = f", {human.count(len(self.skipped), 'newer checkpoint')} skipped" if self.skipped else ""
        return f"{self.id}, {size} in {self.seconds:.2f} s{skipped}"

    __repr__ = __str__

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
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass
class Restorer:
    """One restore, the same on every rank of the world."""

    _source: Source
    _config: Config
    _world: World
    _state: TrainState
    _strict: bool
    _rng: bool
    """Whether random state is put back, too."""
    _surgery: Surgery
    trains = False
    """Whether any rank restores an optimizer or arrays of JAX, and so will save. Equal on all; set by `restore`."""
    seen = 0
    """The newest generation of the remote store, if there is a local one. Equal on all ranks; set by `restore`."""
    _local = False  # the store is on this host, for all ranks
    _key = ""  # of the session at the daemon

    def __post_init__(self) -> None:
        self._together = Together(self._world)
        self._begun: list[str] = []
        """Ids of the checkpoints whose bytes may have been placed."""
        self._overwritten: set[str] = set()

    @gc_paused()
    def restore(self, reference: Reference) -> Restored | None:
        """Restore the newest usable checkpoint, or the named one; None if the run has none.

        Raises the errors of `Checkpointer.restore`, on every rank.
        """
        started = time.perf_counter()
        found = candidates(self._source, self._config, reference) if self._world.rank == 0 else iter(())
        skipped: list[tuple[str, str]] = []
        checks = () if self._config.read_only else (partial(check_others, self._state),)  # what a save would refuse
        checkpoint = self._choose(found, *checks, partial(wait_for_orphan_saver, self._config))
        while checkpoint is not None:
            if checkpoint.thinned and self.trains:
                raise Thinned(
                    f"{checkpoint.id} was thinned: it has weights and no optimizer state. {checkpoint.problem}",
                    "Restore the full checkpoint, or the model without an optimizer",
                )
            try:
                plan, fetcher = self._try(checkpoint)
            except TRY_NEXT as error:
                if self._world.rank == 0:
                    note_damage(self._source, checkpoint, error, lambda _: self._world.beat())
                if not reference.newest:
                    raise
                logger.error("cannot restore %s: %s; trying the checkpoint before it", checkpoint.id, error)
                skipped.append((checkpoint.id, str(error)))
                checkpoint = self._choose(found)
                continue
            except StateMismatch as error:
                if not self._begun or checkpoint.id in self._begun:
                    raise
                raise CorruptObject(
                    f"{', '.join(self._begun)} cannot be read to the end, and {checkpoint.id} before it does not fit: "
                    f"{error.message}",
                    _MIXTURE,
                ) from error
            seconds = time.perf_counter() - started
            note_restored(self._source, self._config, checkpoint.run)
            restored = Restored(
                checkpoint=checkpoint, values=plan.values, skipped=skipped, missing=plan.missing,
                unexpected=plan.unexpected, mismatched=plan.mismatched, unused=plan.unused,
                notes=list(plan.notes), seconds=seconds, rng=plan.restore_rng,
                lease=fetcher.lease, read=dict(fetcher.read), differences=plan.differences,
            )  # fmt: skip
            if self._world.rank == 0:
                logger.info("restored %s", restored)
            return restored
        if skipped:
            raise CorruptObject(
                f"none of the {len(skipped)} checkpoints of run {reference.run!r} can be restored; the newest, "
                f"{skipped[0][0]}: {skipped[0][1]}",
                (_MIXTURE if self._begun else "Nothing was changed") + self._others(reference.run),
            )
        return None

    def _others(self, run: str) -> str:
        """A sentence about the run's checkpoints of other lineages, which are not known to be damaged."""
        with suppress(CkptError):
            if found := [c.id for c in self._source.checkpoints(run) if c.state is State.ABANDONED][:_NAMED]:
                return f". Abandoned checkpoints can be restored by name: restore(checkpoint={found[0]!r})" + "".join(
                    f", {id}" for id in found[1:]
                )
        return ""

    def _choose(self, found: Iterator[Checkpoint], *steps: Callable[[], object]) -> Checkpoint | None:
        """Do the steps, and agree on the next candidate of rank 0."""
        state = self._state

        def report() -> tuple[bool, bool]:
            arrays = not state.modules and any(map(has_templates, state.others.values()))
            return bool(state.optimizers) or arrays, is_local(self._source)

        def choose() -> Any:
            """The candidate, the newest generation that rank 0 has seen, and a name for a session at the daemon."""
            checkpoint = next(found, None)
            if checkpoint is not None and checkpoint.thinned:
                checkpoint = replace(checkpoint, problem=nearest_full(self._source, checkpoint))
            newest = newest_remote_generation(self._source, self._config, checkpoint)
            return msgspec.to_builtins(checkpoint), newest, new_ulid(system_clock())

        answers, (chosen, self.seen, self._key) = self._together.do_and_choose(steps, report, choose)
        self.trains, self._local = any(trains for trains, _ in answers), all(local for _, local in answers)
        return None if chosen is None else convert(chosen, Checkpoint)

    def _try(self, checkpoint: Checkpoint) -> tuple[RestorePlan, Fetcher]:
        """Restore one checkpoint on all ranks. The caller must release the lease, if this rank's fetcher has one."""
        session = RestoreSession(self._config, self._world.rank, self._world.size)
        fetcher = Fetcher(self._source, self._config, self._world, checkpoint, self._local)
        try:
            with fetcher.protecting() as await_lease:
                prepared = self._prepare(fetcher, session, await_lease)
            plan = prepared.plan
            self._begun.append(checkpoint.id)
            self._overwritten |= plan.overwritten
            self._fetch(fetcher, prepared, session)
            fits = self._together.do(partial(self._place, plan, session), report=partial(self._fit, prepared))
            require_fits(plan, fits, self._strict, after=True)
            session.end(Phase.RESTORED)
        except BaseException as error:
            session.end(Phase.FAILED, str(error))
            if fetcher.lease is not None:
                release_lease(self._source, checkpoint.run, fetcher.lease)
            raise
        return plan, fetcher

    def _prepare(self, fetcher: Fetcher, session: RestoreSession, await_lease: Callable[[], None]) -> PreparedRestore:
        """Read the documents and plan; changes nothing live. One meeting; one more if ranks exchange what they read,
        and one more under another world size, where rank 0 reads the items of all ranks and shares them out.

        await_lease: see Fetcher.protecting. Raises StateMismatch if the checkpoint does not fit
        the objects of every rank.
        """
        world, prepared = self._world, PreparedRestore(self._source, fetcher, self._state, self._rng, self._surgery)
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
            session.end(Phase.FAILED, "not all ranks could join")
        if prepared.manifest.world_size == world.size:
            fits = [fit for *_, fit in reports]
        else:
            share = partial(prepared.share_out, reports[0][1], world, self._strict)
            fits = self._together.do(share, prepared.plan_reads, report=partial(self._fit, prepared))
        require_fits(prepared.plan, fits, self._strict)
        prepared.plan.strict = self._strict
        return prepared

    def _fit(self, prepared: PreparedRestore) -> RestoreFit | None:
        return None if prepared.rank_state is None else prepared.plan.fit(self._overwritten)

    def _fetch(self, fetcher: Fetcher, prepared: PreparedRestore, session: RestoreSession) -> None:
        def progress(num_bytes: int) -> None:
            self._world.beat()
            session.progress(num_bytes)

        destinations = prepared.plan.destinations

        def fetch() -> None:
            session.enter(Phase.FETCHING, raw_bytes(destinations.reads))
            with destinations.receiving() as buffers:
                fetcher.fetch(prepared.manifest.content, destinations.reads, buffers, progress)

        do = partial(self._together.do, report=partial(len, destinations.waiting))
        waiting, steps = [1], Steps()
        while any(waiting):  # of any rank: fetching is a collective
            try:
                waiting = do(*steps, fetch)
            except CorruptObject as error:
                if not fetcher.read_past_caches():
                    raise
                logger.warning("reading again, bypassing the daemon's cache: %s", error)
                waiting = do(fetch)
            steps = (destinations.place,)

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


TRY_NEXT = (CorruptObject, ObjectMissing, NoCheckpoint)
"""Errors that another checkpoint may cure."""


class _Answer(NamedTuple):
    """The message of one rank in a meeting: JSON types and bytes."""

    steps: int
    """The steps of the work that it has done."""
    report: Any = None
    error: Sequence[Any] | None = None
    """Code, message, hint and damaged chunks."""


@dataclass
class Together:
    """The meetings of one restore, where an error on one rank is raised on all. All call the same methods in order.

    A meeting costs more than most of the work between two of them. So work that changes nothing of the caller's is done
    in several steps before one meeting. The error that counts is the one of the earliest step, as if the ranks had met
    after each. NoCheckpoint is the exception: it explains what other ranks found missing or damaged in earlier steps.
    """

    _world: World
    _error: CkptError | None = None

    def do(self, *steps: Callable[[], object], report: Callable[[], Any] = lambda: None) -> list[Any]:
        """Do the steps one after the other, then meet. Returns every rank's report (JSON types and bytes).

        Raises one rank's error on all ranks: of the earliest step that failed, or NoCheckpoint of any step. Among these
        one that another checkpoint would not cure takes precedence, then NoCheckpoint.
        """
        return self.do_and_choose(steps, report, lambda: None)[0]

    def do_and_choose(
        self, steps: Steps, report: Callable[[], Any], choose: Callable[[], Any]
    ) -> tuple[list[Any], Any]:
        """The same. In that meeting rank 0 calls `choose` if no rank has failed, and all ranks get what it returns."""

        def decide(answers: list[Any]) -> list[Any]:
            if any(answer.error is not None for answer in starmap(_Answer, answers)):
                return answers
            return [*answers, self._answer((), choose)]

        *answers, chosen = self._checked(self._world.decide(self._answer(steps, report), decide))
        return [answer.report for answer in answers], chosen.report

    def _answer(self, steps: Steps, report: Callable[[], Any]) -> _Answer:
        done = 0
        self._error = None
        try:
            for step in steps:
                step()
                done += 1
                self._world.beat()
            return _Answer(done, report())
        except RankLost:
            raise
        except CkptError as caught:
            error = caught
        except Exception as caught:
            # The other ranks must not wait for a rank that will never answer.
            error = RestoreFailed(f"rank {self._world.global_rank} cannot restore: {caught!r}")
            error.__cause__ = caught
        self._error = error
        return _Answer(done, None, (error.code, error.message, error.hint, list(error.chunks)))

    def _checked(self, answers: list[Any]) -> list[_Answer]:
        """The answers of all ranks, if none of them has failed."""
        parsed = list(starmap(_Answer, answers))
        failed = [(answer.steps, self._error_of(*answer.error)) for answer in parsed if answer.error is not None]
        if not failed:
            return parsed
        first = min(steps for steps, _ in failed)
        errors = [error for steps, error in failed if steps == first or isinstance(error, NoCheckpoint)]
        raise min(errors, key=_precedence)

    def _error_of(self, code: str, message: str, hint: str, chunks: Sequence[tuple[str, int]]) -> CkptError:
        error = error_from_code(code, message, hint)
        error.chunks = tuple((shard, index) for shard, index in chunks)
        own = self._error
        if own is not None and (own.code, own.message, own.chunks) == (code, message, error.chunks):
            return own
        return error


def _precedence(error: CkptError) -> int:
    """Data that a checkpoint lacks because it is being deleted is not damage."""
    return 1 if isinstance(error, NoCheckpoint) else 2 if isinstance(error, TRY_NEXT) else 0


Restore = Callable[[TrainState, str | int | None], Restored | None]
"""Restores a state from a checkpoint, the newest usable one for None; leaves random state as it is."""


@dataclass(repr=False)
class StagedRestore:
    """The stages of one restore; made by `Checkpointer.restore_in_stages`, for the training thread.

        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            optim = AdamW(model.parameters())
            stages.optimizers(optim)
            stages.extras(scheduler=sched, loader=loader)

    Random state is put back by `stages.rng()`, or when the block ends without an error.

    Under a process group each stage is a collective: all ranks call the same ones in the same order. The first stage
    chooses the checkpoint, and skips a damaged one; a later stage raises CorruptObject. A lease protects it from the
    first stage on. `Checkpointer.restore` explains what a stage returns and raises. Without a checkpoint every stage
    returns None and changes nothing.
    """

    _restore: Restore
    _checkpoint: str | int | None
    _model: Model | None = None
    _extras: list[object] = field(default_factory=list)
    _begun: bool = False
    _rng_done: bool = False
    restored: Restored | None = None
    """The result of the newest stage; None before the first one, or if the run has no checkpoint."""

    def model(self, model: Model) -> Restored | None:
        """Restore the model."""
        self._model = model
        return self._stage(TrainState.of(model, None, {}))

    def optimizers(self, optim: Optimizers) -> Restored | None:
        """Restore optimizers. The model, whose names their state has, must have been restored; it is not read again.

        Saves continue from this checkpoint, as after `restore` with an optimizer. Raises InvalidRequest.
        """
        if self._model is None:
            raise InvalidRequest("optimizer state has the names of the model's parameters", "Call model(model) first")
        return self._stage(replace(TrainState.of(self._model, optim, {}), placed=frozenset((MODEL,))))

    def extras(self, shared: Mapping[str, Any] | None = None, **extras: Any) -> Restored | None:
        """Restore further objects: modules, schedulers, loaders; plain data is in `Restored.values` of the result."""
        state = TrainState.of(None, None, extras, shared).to_restore()
        self._extras += state.others.values()
        return self._stage(state)

    def rng(self) -> None:
        """Put random state back: last, before the first step."""
        self._rng_done = True
        if self.restored is not None:
            restore_rng(self.restored.rng, self._extras)

    def __enter__(self) -> StagedRestore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is None and not self._rng_done:
            self.rng()

    def _stage(self, state: TrainState) -> Restored | None:
        if self._begun and self.restored is None:
            return None
        restored = self._restore(state, self._checkpoint)
        self._begun = True
        if restored is not None:
            self.restored, self._checkpoint = restored, restored.id
        return restored


def load_tensors(source: Source, checkpoint: Checkpoint, pattern: str) -> dict[str, Any]:
    """The entries whose name matches a shell pattern, on the CPU, by name; further names of an entry share it.

    Tensors of torch; arrays of numpy in a process that has loaded JAX and not torch, or where torch is not installed.
    """
    with leased(source, checkpoint), noting_damage(source, checkpoint):
        content = read_manifest(source, checkpoint).content
        destinations = make_destinations(content)
        entry_of = {**{name: name for name in content.entries.name}, **content.aliases}
        wanted = {name: entry for name, entry in entry_of.items() if fnmatchcase(name, pattern)}
        tensors = {entry: destinations.new(entry) for entry in dict.fromkeys(wanted.values())}
        destinations.read(source, checkpoint)
        return {name: tensors[entry] for name, entry in wanted.items()}
