"""The facade: one run's checkpoints, as the training loop sees them."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ckpt.capture.assets import read_files
from ckpt.capture.train_state import TrainState
from ckpt.config import Assets, Config, takes
from ckpt.lazily import torch_loaded
from ckpt.preemption import DaemonNotice, Preemption, SaveEstimate, Sources, estimate_save
from ckpt.ranks.world import World, is_grouped
from ckpt.restoring.pipeline import Restored, Restorer, StagedRestore, load_tensors
from ckpt.restoring.plan import NO_SURGERY, Cast, Globs, Surgery
from ckpt.restoring.resolve import check_present, release_lease, wait_for_orphan_saver
from ckpt.schedule import Limits, Schedule, cost_of
from ckpt.snapshot.handle import Counters, SaveHandle
from ckpt.snapshot.run_saves import RunSaves
from ckptapi.opening import open_source
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import InvalidRequest, NoCheckpoint, Superseded
from ckptstore.names import Reference
from ckptstore.reading.source import Source
from ckptstore.threads import start_daemon

if TYPE_CHECKING:
    from ckpt.capture.train_state import Model, Optimizers

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one run. Use it from one thread, the training thread; handles may go anywhere.

    Construction performs no I/O, except that it reads `assets`. As a context manager it closes on exit; so does the end
    of the interpreter.
    """

    @takes(Config)
    def __init__(self, config: Config) -> None:
        """Raises InvalidName or InvalidRequest."""
        if torch_loaded():
            _load_modules_of_torch()
        self.config = config
        self._source: Source = open_source(
            config.source, config.token, config.options, patience_s=config.retry_s, local=config.local
        )
        self._assets = config.assets
        if self._assets is not None and self._is_first():
            self._assets = read_files(self._assets)
        self._saves = RunSaves(config, self._source, self._world, partial(check_present, self._source, config))
        self._releasing: list[threading.Thread] = []
        self._publisher: Checkpointer | None = None
        self._schedules: list[Schedule] = []
        self._preemption = Preemption(self.fits, self._saves.expedite)
        _close_at_exit(self)

    def prepare(
        self,
        /,
        model: Model | None,
        optim: Optimizers | None,
        *,
        shared: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> None:
        """Agree with the other ranks on who writes what, start the saver and preallocate snapshot memory, so that the
        first save is as fast as later ones. A collective of all ranks.

        Takes about half a second per GB, and waits for GPUs; memory for further slots is allocated in the background.
        Without this call the first save does it, and waits. Call it again when the layout of the state has changed:
        other parameters, or other parts of them on this rank. The first call waits for the saver of a killed trainer,
        as `restore` does: after it this process counts as a live trainer. Raises UnsupportedObject, InvalidRequest,
        RankLost, RunVanished, Unavailable.
        """
        state = TrainState.of(model, optim, extras, shared, self._assets)
        if self._saves.client is None:
            wait_for_orphan_saver(self.config)
        self._saves.prepare(state)

    def save_async(
        self,
        /,
        model: Model | None,
        optim: Optimizers | None,
        step: int,
        *,
        grads: bool = False,
        metrics: Mapping[str, float] | None = None,
        shared: Mapping[str, Any] | None = None,
        assets: Assets | None = None,
        repeat_step: bool = False,
        **extras: Any,
    ) -> SaveHandle:
        """Copy the state to host memory and return; it becomes durable in the background.

        Training may continue. With an optimizer and overlap=True, its parameters and state are copied meanwhile, and
        `optim.step()` waits for the copy. A committed checkpoint is the state at the call, on every rank; otherwise
        nothing is committed.

        model: any module. optim: one, or several; either may be None. grads: also keep gradients. metrics: for listings
        and retention. extras: modules, objects with state_dict, or data, kept per rank. shared: such objects that all
        ranks hold alike. assets: files, in place of the setting's. repeat_step: the step may have been saved.
        Every rank calls it with the same step. Raises the error of an earlier save, Superseded, InvalidRequest,
        UnsupportedObject, LayoutChanged, RankLost.
        docs/explanation/saves.md says more.
        """
        state = TrainState.of(model, optim, extras, shared, self._assets if assets is None else assets)
        cost_before = cost_of(self._saves.newest, self._schedules)
        return self._saves.save(state, step, grads, metrics, self.config.on_busy, repeat_step, cost_before)

    def save(
        self,
        /,
        model: Model | None,
        optim: Optimizers | None,
        step: int,
        *,
        grads: bool = False,
        metrics: Mapping[str, float] | None = None,
        shared: Mapping[str, Any] | None = None,
        assets: Assets | None = None,
        repeat_step: bool = False,
        **extras: Any,
    ) -> Checkpoint:
        """As save_async, but return when the checkpoint of all ranks is durable; waits for a slot if none is idle."""
        state = TrainState.of(model, optim, extras, shared, self._assets if assets is None else assets)
        cost_before = cost_of(self._saves.newest, self._schedules)
        handle = self._saves.save(state, step, grads, metrics, "wait", repeat_step, cost_before)
        with self._saves.steps.waiting():
            return handle.result()

    def publish(self, model: Model, step: int, *, metrics: Mapping[str, float] | None = None) -> SaveHandle:
        """Save the weights of a model alone, for readers: asynchronously, as a checkpoint of the run RUN/weights.

        float32 parameters are rounded to bfloat16. Chunks are stored as deltas of the last checkpoint, which the saver
        keeps in memory. A restore of this run never takes them. All else is as for `save_async`.
        """
        if self._publisher is None:
            self._publisher = Checkpointer(**vars(self.config) | {"run": f"{self.config.run_name}/weights"})
            saves = self._publisher._saves
            saves.agreement.publishes, saves.looks = True, False
        return self._publisher.save_async(model, None, step, metrics=metrics)

    def restore(
        self,
        /,
        model: Model | None = None,
        optim: Optimizers | None = None,
        *,
        checkpoint: str | int | None = None,
        strict: bool | Literal["report"] = True,
        rng: bool = True,
        rename: Mapping[str, str] | None = None,
        only: Globs = (),
        skip: Globs = (),
        grow: Globs = (),
        cast: Cast = False,
        shared: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> Restored | None:
        """Restore a checkpoint into the objects, in place; None if the run has none yet.

        checkpoint: a step or an id; default: the newest not corrupt. strict: names, shapes and types must
        agree; False: what fits is restored; "report": and a table is logged. rng: put random state back. rename: names
        in the checkpoint to names here, {"encoder.*": "backbone.*"}. only, skip: of names here. grow: those that may
        take fewer rows. cast: convert types; functions by name make quantized weights.
        docs/how-to/restore-into-another-model.md explains these.

        Plain data, or without any object all, comes back in `Restored.values`. Collective. Saves continue from it.
        Raises StateMismatch or InvalidRequest before anything is changed, UnsupportedObject, RunVanished; CorruptObject
        or Unavailable, after which the objects may hold a mixture and must not be trained on.
        """
        state = TrainState.of(model, optim, extras, shared).to_restore()
        surgery = Surgery.of(rename, only, skip, grow, cast)
        if surgery != NO_SURGERY and not state.modules:
            raise InvalidRequest("there is no module whose names could be matched", "Pass the model")
        restored = self._restore(state, checkpoint, strict=strict, rng=rng, surgery=surgery)
        if restored is not None and restored.unused and optim is not None and self._world().rank == 0:
            logger.warning(
                "%s also holds %s, not restored. Pass them to restore, or training continues with their present state",
                restored.id,
                ", ".join(restored.unused),
            )
        return restored

    def restore_in_stages(
        self, *, checkpoint: str | int | None = None, strict: bool | Literal["report"] = True, cast: Cast = False
    ) -> StagedRestore:
        """Restore in stages, all from one checkpoint: see StagedRestore. checkpoint, strict, cast: see `restore`."""
        surgery = Surgery(cast=cast)
        return StagedRestore(partial(self._restore, strict=strict, rng=False, surgery=surgery), checkpoint)

    def _restore(
        self,
        state: TrainState,
        checkpoint: str | int | None,
        *,
        strict: bool | Literal["report"],
        rng: bool,
        surgery: Surgery,
    ) -> Restored | None:
        with suppress(Superseded):  # a restore is the remedy
            self.wait()
        saves = self._saves
        saves.meet()
        must_fit = bool(strict) and strict != "report"
        restorer = Restorer(self._source, self.config, self._world(), state, must_fit, rng, surgery)
        try:
            restored = restorer.restore(Reference.of(self.config.run_name, checkpoint))
        finally:
            # A restore that fails, or finds the remote store away, takes nothing back of what an earlier one saw.
            saves.session.seen = max(saves.session.seen, restorer.seen)
            self._release_lease()  # of what was restored before, which may be the same checkpoint
        if restored is not None:
            if strict == "report" and restored.differences and self._world().rank == 0:
                logger.warning("%s was restored as far as it fits:\n%s", restored.id, restored.differences)
            saves.lease, session = restored.lease, saves.session
            # Arrays of JAX from another run may be a teacher: training does not continue from them.
            own = bool(state.modules or state.optimizers) or restored.checkpoint.run == self.config.run_name
            if session.restored(restored.checkpoint, restorer.trains and own):
                saves.steps.restored(session.parent, restored.step, restored.seconds)
                if saves.trace is not None:
                    saves.trace.reached("restored", restored.step, state, self.wait)
                if self._publisher is not None:
                    self._publisher._saves.session.restored(restored.checkpoint, True)
        if restorer.trains and not self.config.read_only:
            saves.make_ready(replace(state.without_others(), assets=self._assets))
        return restored

    def load(self, checkpoint: str | int | None = None, names: str = "*") -> dict[str, Any]:
        """Tensors without a model: those whose name matches the pattern, e.g. "model/*", verified, on the CPU.

        Raises NoCheckpoint, CorruptObject, ObjectMissing or Unavailable.
        """
        return load_tensors(self._source, self._source.find(Reference.of(self.config.run_name, checkpoint)), names)

    def every(
        self,
        seconds: float | None = None,
        overhead: float | Literal["auto"] | None = "auto",
        mtbf_s: float | None = None,
    ) -> Schedule:
        """When to save: `schedule = checkpointer.every(); ...; if schedule.due(step): checkpointer.save_async(...)`.

        overhead: the share of the time that saves may cost training, as measured: what save_async and the gate of
        optim.step() hold it up, and what steps take longer while a save is under way. None: any. "auto": 0.01, or any
        with mtbf_s. seconds: from save to save, at least. mtbf_s: mean time between failures of the job in seconds;
        the interval is then the one that loses the least to saves and failures together, by the measured cost
        (`ckptplan.training.best_interval`; docs/how-to/planning.md has the formula). The longest of these intervals
        counts, and never less than twice the time until a save is durable. Without seconds the first save comes soon,
        to see what it costs. The slowest rank's cost is used. Raises InvalidRequest.
        """
        schedule = Schedule(
            lambda: self._saves.newest,
            Limits.of(seconds, overhead, mtbf_s),
            self.config.peer_timeout_s,
            self._saves.steps,
            self._preemption,
            self.config.group,
            _optimizer_steps(),
        )
        self._schedules.append(schedule)
        return schedule

    @takes(Sources)
    def on_preemption(self, sources: Sources) -> None:
        """A second call replaces the sources of the first. Raises InvalidRequest, also outside of the main thread."""
        config = self.config
        daemon = DaemonNotice(config.daemon, config.token, config.run_name) if config.daemon is not None else None
        self._preemption.watch(sources, daemon if self._is_first() else None)

    def fits(self, seconds: float, begins_in_s: float = 0.0) -> SaveEstimate:
        """Whether a save that begins in `begins_in_s` is durable `seconds` later, by the rates of the newest one.

        True (`choice` "save") if it is, with a quarter of `begins_in_s` and of the estimate to spare, or if no save has
        been measured. The estimate assumes that nothing is compressed or referenced, and that the save which is
        being uploaded then is finished first. For the training thread.
        """
        return estimate_save(seconds, self._saves.measured, self._saves.pending(), begins_in_s)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint of the run, or None.

        Before the first save it waits for the saver of a killed trainer, as `restore` does: a job may choose by it
        where to resume. With `replicas`, InvalidRequest on several ranks before the hosts have met: what this one knows
        may be old.
        """
        if self._saves.client is None:
            wait_for_orphan_saver(self.config)
        self._saves.meet(together=False)
        try:
            return self._source.latest(self.config.run_name)
        except NoCheckpoint:
            return None

    def wait(self, timeout: float | None = None) -> None:
        """Return when every save is durable or skipped; raises the first error of one that failed, or TimeoutError."""
        if self._publisher is not None:
            self._publisher.wait(timeout)
        self._saves.wait(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Return when every save is durable, and end the saver. A second close does nothing.

        Raises the error of a save that failed and was not seen, or TimeoutError; a saver process
        that is out of time goes on by itself.
        """
        if self._saves.elsewhere:
            return
        try:
            self._saves.close(timeout)
        finally:
            if self._publisher is not None:
                self._publisher.close(timeout)
            self._preemption.notice.close()  # not before: a second signal must not kill this process while it saves
            while self._schedules:
                self._schedules.pop().close()
            self._release_lease()
            while self._releasing:
                self._releasing.pop().join()
            self._source.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def counters(self) -> Counters:
        """The saves so far, counted by result; for any thread, also after `close`."""
        return self._saves.tally.counters

    @property
    def saver_pid(self) -> int | None:
        """Process id of the saver, while there is one."""
        return self._saves.client.saver_pid if self._saves.client is not None else None

    def _world(self) -> World:
        return World(self.config.peer_timeout_s, self.config.group)

    def _is_first(self) -> bool:
        """Whether this is rank 0 of its group; if the job has no process group yet, by its environment."""
        if self.config.group == "solo" or is_grouped():
            return self._world().rank == 0
        return os.environ.get("RANK", "0") == "0"

    def _release_lease(self) -> None:
        """In a thread, which `close` waits for: a restore does not."""
        lease, self._saves.lease = self._saves.lease, None
        if lease is not None:
            release = start_daemon("ckpt-lease", release_lease, self._source, self.config.run_name, lease)
            self._releasing.append(release)


def _load_modules_of_torch() -> None:
    """Load in advance what the first save and restore of tensors will use."""
    import ckpt.capture.state
    import ckpt.capture.unsaved_objects
    import ckpt.restoring.objects
    import ckpt.restoring.sharing
    import ckpt.snapshot.overlap  # noqa: F401


def _close_at_exit(checkpointer: Checkpointer) -> None:
    """Close it when the interpreter ends, while threads may still be started; until then hold no reference."""
    reference = weakref.ref(checkpointer)

    def close() -> None:
        if (found := reference()) is None:
            return
        try:
            found.close()
        except Exception:
            logger.exception("a save was not durable when the interpreter ended")

    # atexit itself comes too late: thread pools refuse work by then.
    threading._register_atexit(close)  # type: ignore[attr-defined]


def _optimizer_steps() -> Callable[[], int] | None:
    if not torch_loaded():
        return None
    from ckpt.capture.unsaved_objects import optimizer_steps

    return optimizer_steps
