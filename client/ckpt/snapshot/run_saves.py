"""RunSaves: the saves of one run by this process, from the agreement of the ranks to the end of the saver.

All ranks make the same calls in the same order, so each derives the same session and the same attempts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from ckpt.capture.train_state import TrainState
from ckpt.capture.values import check_others
from ckpt.config import Config, OnBusy
from ckpt.lazily import torch_loaded
from ckpt.ranks.world import World
from ckpt.saver.messages import DropQueued, Expedite
from ckpt.snapshot.agreement import LayoutAgreement
from ckpt.snapshot.client import SaveClient, Snapshot, finite
from ckpt.snapshot.costs import StepClock
from ckpt.snapshot.handle import LiveCounters, LiveHandle, SaveHandle, time_left
from ckpt.snapshot.live import LiveState
from ckpt.trace import trace_of_process
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.errors import BadInput, CkptError, InvalidRequest, RankLost, SaveSkipped, Superseded
from ckptstore.format.records import SaveCost
from ckptstore.names import Attempt, check_step, derive_ulid
from ckptstore.reading.source import Source, StoreSource
from ckptstore.run import trackers
from ckptstore.stores import is_local
from ckptstore.threads import start_daemon
from ckptstore.tiers.source import TieredSource

if TYPE_CHECKING:
    from ckpt.capture.leaves import Captured
    from ckpt.snapshot.overlap import Overlap

logger = logging.getLogger(__name__)


_ENDS_S = 120.0
"""How long a session waits for the saves of the one that it continues."""
_sessions: dict[Hashable, TrainerSession] = {}
"""By process, stores and run: the session that restored or saved last."""


class TrainerSession:
    """The current session: its parent, and the steps that were saved in it."""

    def __init__(self, run: str, *stores: str | None) -> None:
        self._run = run
        self._place = os.getpid(), run, *stores
        self._restores = 0
        self._continues = False
        """Whether it has resumed a training run, or saved."""
        self._parent: Attempt | None = None
        self.seen = 0
        """The newest generation that a restore saw in the remote store; see Session."""
        self._begin()

    def _begin(self) -> None:
        self._session: Session | None = None
        """Known from the first save on."""
        self._calls: Counter[int] = Counter()
        self._newest: Attempt | None = None
        """The last committed save of the highest step."""
        self._pending: list[LiveHandle] = []
        """The saves that had not ended at the last call. Ended ones are released: a job may run for months."""
        self._superseded: Superseded | None = None

    def restored(self, checkpoint: Checkpoint, trains: bool) -> bool:
        """Begin a new session: training continues from this checkpoint. Returns whether it does.

        trains: an optimizer was restored, on any rank. Without one, only the first restore of a trainer counts: later
        ones are of other models, such as a teacher or an average, and change nothing.
        """
        if self._continues and not trains:
            return False
        self._restores += 1
        self._continues = trains
        self._parent = checkpoint.attempt if checkpoint.run == self._run else None
        self._begin()
        if self._parent is not None:
            _sessions[self._place] = self
        return True

    @property
    def parent(self) -> str | None:
        """The attempt of this run from which training continues."""
        return str(self._parent) if self._parent is not None else None

    def new_attempt(self, agreed: str, step: int) -> NewAttempt:
        """The attempt of a call that saves `step`, even if it fails: all ranks count their calls.

        agreed: the ULID that the ranks agreed on.
        """
        if self._session is None:
            earlier, _sessions[self._place] = _sessions.get(self._place), self
            if self._parent is None and earlier is not None and earlier is not self:
                self._parent = earlier.newest()
            id = derive_ulid(agreed, "session", self._restores) if self._restores else agreed
            self._session = Session(id, self._parent, self.seen)
        number = self._calls[step]
        self._calls[step] += 1
        return NewAttempt(self._session, step, derive_ulid(self._session.id, step, number), number)

    def supersede(self, error: Superseded) -> None:
        """Another trainer has superseded the session: raises this error, now and at every further `check`."""
        self._superseded = error
        raise error

    def end(self, unreplicable: Mapping[str, Superseded]) -> None:
        """Raises the session's error of those by session, unless a save has raised it."""
        error = unreplicable.get(self._session.id) if self._session is not None else None
        if error is not None and self._superseded is None:
            raise error

    def newest(self) -> Attempt | None:
        """The attempt from which another session of this process continues. Waits for the saves that are under way."""
        left_s = time_left(_ENDS_S)
        for handle in self._pending:
            handle.wait_ended(left_s())
        self._look()
        return self._newest or self._parent

    def check(self, step: int, repeat: bool = False) -> None:
        """Raises Superseded if another trainer has superseded the session, or InvalidRequest if a restore would not
        find this save: the step, or a higher one, was saved.

        repeat: the highest step may be saved more than once in a session.
        """
        self._look()
        if self._superseded is not None:
            raise self._superseded
        newest = max((one.step for one in (self._newest, *self._pending) if one is not None), default=-1)
        if step < newest or (step == newest and not repeat):
            raise InvalidRequest(
                f"step {newest} of run {self._run!r} was saved already, and nothing was restored since: a restart "
                f"would not continue from this save of step {step}",
                "Count steps over all epochs. repeat_step=True saves the highest step again, in place of its earlier "
                "save; restore(checkpoint=...) goes back",
            )

    def _look(self) -> None:
        """Take note of the saves that have ended."""
        ended = [handle for handle in self._pending if handle.done()]
        self._pending = [handle for handle in self._pending if handle not in ended]
        for handle in ended:
            if handle.committed:
                attempt = handle.result().attempt
                self._newest = max(self._newest or attempt, attempt, key=lambda one: one.step)
            elif isinstance(handle.error, Superseded):
                self._superseded = handle.error

    def saved(self, handle: LiveHandle) -> None:
        """A save has begun."""
        self._continues = True
        self._pending.append(handle)


def take_snapshot(client: SaveClient, snapshot: Snapshot, overlap: Overlap | None, on_busy: OnBusy) -> bool:
    """Copy the state and make it durable in the background. False if the save is skipped instead.

    On return the state is copied; with overlap, state that changes only in `optim.step()` may be copied after return.
    Where the host has no memory for a copy, the state itself is durable on return. An error means that nothing was
    saved, unless a signal handler has raised it: then the save goes on if its state was copied.
    """
    leaves, layout, started = snapshot.captured.leaves, snapshot.layout, time.perf_counter()
    if not leaves:
        client.calls.run(client.submit, snapshot)
        return True
    try:
        acquired = _acquire(client, snapshot, on_busy)
    except OSError as error:
        _save_live(client, snapshot, error)
        return True
    if not acquired:
        client.calls.run(client.skip, snapshot)
        return False
    slot, began = snapshot.slot, time.perf_counter()
    assert slot is not None
    snapshot.handle.measure(wait_s=began - started)
    if overlap is None or not overlap.on:
        slot.stager.stage(leaves, layout, snapshot.captured.sameness)
    elif overlap.copy(client, snapshot, slot.stager):
        return True  # it is submitted in the background
    snapshot.handle.measure(stage_s=time.perf_counter() - began)
    client.calls.run(client.submit, snapshot)
    return True


_WARN_AFTER_S = 30.0


def _acquire(client: SaveClient, snapshot: Snapshot, on_busy: OnBusy) -> bool:
    """Give a snapshot a slot. If all are in use: False ("skip"), or wait for one ("wait").

    "supersede" removes the oldest save whose upload has not begun from the queue, and waits if there is none.
    """
    while not client.calls.run(client.acquire, snapshot):
        if on_busy == "skip":
            return False
        if on_busy == "supersede":
            client.calls.run(client.send, DropQueued(snapshot.attempt.step))
            on_busy = "wait"
        if not client.arena.released.wait(_WARN_AFTER_S):
            for oldest in client.pending[:1]:
                logger.warning("training waits for an idle slot: the save of step %d has not ended", oldest.step)
    return True


def _save_live(client: SaveClient, snapshot: Snapshot, cause: OSError) -> None:
    """Save without a copy: return when the writer, in threads of this process, no longer reads the state.

    cause: why there is no memory for a copy.
    """
    client.calls.run(client.use_threads, cause)
    client.wait_stopped(None)
    state = LiveState(snapshot.captured.leaves, snapshot.layout)

    def end() -> None:
        state.close()  # an interrupted save fails, unless everything was read already
        snapshot.handle.wait_staged(None if snapshot.submitted else 0)

    try:
        try:
            client.calls.run(client.submit_live, snapshot, state)
            snapshot.handle.wait_staged()
        finally:
            end()
    finally:
        end()  # an exception may have interrupted the first one


@dataclass
class RunSaves:
    """The saving half of a Checkpointer, whose methods explain the errors. For the training thread."""

    _config: Config
    _source: Source
    _world: Callable[[], World]
    _check: Callable[..., None]
    """Raises where the run may not begin; see `check_present`."""

    def __post_init__(self) -> None:
        """Performs no I/O."""
        config, source = self._config, self._source
        self._pid = os.getpid()
        self.tally = LiveCounters()
        self.client: SaveClient | None = None
        """None before the first save, and after `close`."""
        is_tier = isinstance(source, TieredSource)
        saves_to = source.local if isinstance(source, TieredSource) else source
        folder = saves_to if isinstance(saves_to, StoreSource) and (is_tier or is_local(saves_to.url)) else None
        if config.replicas is not None:
            folder = None  # each host has its own
        self.agreement = LayoutAgreement(self._world, config.split_replicas, folder, is_tier)
        self.session = TrainerSession(config.run_name, config.source, config.local)
        self._met = config.replicas is None or not is_tier
        self.overlap: Overlap | None = None
        self.steps = StepClock()
        self.newest: SaveHandle | None = None
        """The save that began last."""
        self.looks = True
        """Whether to look for objects that are not saved. An integration knows what its framework saves or resumes."""
        self._warned = False
        self.lease: str | None = None
        """The lease of what was restored: a save that begins later releases it, once it is committed."""
        self._measured: SaveHandle | None = None
        self._expedited = False
        self._looking: threading.Thread | None = None
        self.trace = trace_of_process()

    @property
    def elsewhere(self) -> bool:
        """Whether this process is a fork of the one that saves, and so has neither the arena nor the saver."""
        return os.getpid() != self._pid

    def prepare(self, state: TrainState) -> None:
        """Agree with the other ranks, start the saver, and return once there is a slot; with a GPU, all. A collective.

        A rank where the run may not begin fails the call on every rank.
        """
        self.meet()
        client = self._saving_client()
        self._join()
        client.calls.run(client.start)
        self.agreement.agree(state, self._check)
        extra = check_others(state, self._world().rank)
        state = state.without_others()
        self._gate(state)  # before the first step, so that its hooks are in place
        captured, num_bytes = self.agreement.estimate(state)
        client.calls.run(client.arena.expect, num_bytes + extra, captured.leaves.gpu, True)
        client.calls.run(client.arena.warm_up, captured.leaves)

    def save(
        self,
        state: TrainState,
        step: int,
        grads: bool,
        metrics: Mapping[str, float] | None,
        on_busy: OnBusy,
        repeat_step: bool,
        cost_before: SaveCost | None,
    ) -> SaveHandle:
        """The handle of a save that has begun, or was skipped. cost_before: what the save before this one cost."""
        started = time.perf_counter()
        self.meet()
        client = self._saving_client()
        self._join()
        step = check_step(step)
        agreed = self.agreement.session or self.agreement.agree(state, self._check_begin).session
        parent = self.session.parent
        attempt = self.session.new_attempt(agreed, step)
        if self.session.parent != parent:  # that of an earlier Checkpointer of this process
            self.steps.restored(self.session.parent, step, 0.0)
        if self.newest is None:
            self.steps.trackers = trackers()  # MLflow knows the run of a thread
        with client.declining(attempt):
            if not client.ready:
                client.calls.run(client.begin)
            self.session.check(step, repeat_step)
            if (unreplicable := client.unreplicable.get(attempt.session.id)) is not None:
                self.session.supersede(unreplicable)
            captured = self.agreement.capture(state, grads, attempt.ulid)
            if not grads and state.optimizers:
                self._look_for_gradients(state, captured)
            layout = self.agreement.layout
            handle = LiveHandle(step, layout.num_bytes, started)
            snapshot = Snapshot(attempt, captured, layout, handle, finite(metrics), self.lease, cost_before)
            if self._expedited:
                on_busy = "wait"  # the last save: the slots of those that were dropped are released shortly
            taken = take_snapshot(client, snapshot, self._gate(state), on_busy)
        if taken:
            self.lease = None
        self.session.saved(handle)
        if self.newest is None and torch_loaded() and self.looks:
            self._look_for_unsaved(state, handle)
        self._measured = self.measured
        self.newest = handle
        handle.measure(blocked_s=time.perf_counter() - started)
        self.steps.saving(handle)
        if self.trace is not None:
            self.trace.reached("saved", step, state, self.wait)
        self.tally.add(blocked_s=handle.timings.blocked_s, wait_s=handle.timings.wait_s)
        return handle

    def _check_begin(self) -> None:
        if self.session.parent is None:
            self._check(noted=True)

    def _look_for_gradients(self, state: TrainState, captured: Captured) -> None:
        """Warn once, when what the look reads has been read."""
        from ckpt.capture.unsaved_objects import unsaved_gradients

        found = unsaved_gradients(state, captured.reads.read)

        def warn() -> None:
            if found() and not self._warned:
                self._warned = True
                logger.warning(
                    "a save was made between a backward pass and the step of its optimizer, without the gradients: a "
                    "resumed run goes on without them; save after the step, or pass grads=True"
                )

        captured.late.append(warn)

    def _look_for_unsaved(self, state: TrainState, handle: LiveHandle) -> None:
        """Once the first save has ended: the interpreter runs nothing else meanwhile, and a save must be short."""
        from ckpt.capture.unsaved_objects import look_for_unsaved

        look = look_for_unsaved(state)

        def look_later() -> None:
            handle.wait_ended()
            look()

        self._looking = start_daemon("ckpt-unsaved", look_later)

    def make_ready(self, state: TrainState) -> None:
        """A training run will save: its first save need wait neither for the saver nor for memory. A collective.

        Everything is restored: a rank that has ended since is not reported here but by the next meeting.
        """
        client = self._saving_client()
        client.calls.run(client.start)
        if self.agreement.session is not None:
            return
        try:
            captured, num_bytes = self.agreement.estimate(state)
            client.calls.run(client.arena.expect, num_bytes, captured.leaves.gpu, False)
        except (BadInput, RankLost) as error:
            logger.warning("the first save will wait for its memory: %s", error)

    @property
    def measured(self) -> SaveHandle | None:
        """The newest save that is committed and uploaded something."""
        newest = self.newest
        return newest if newest is not None and newest.committed and newest.timings.upload_s else self._measured

    def pending(self) -> list[SaveHandle]:
        """The saves that have not ended, oldest first."""
        return self.client.pending if self.client is not None else []

    def expedite(self) -> None:
        """Make the next save durable as soon as possible."""
        self._expedited = True
        if self.client is not None:
            self.client.calls.run(self.client.send, Expedite())

    def wait(self, timeout: float | None = None) -> None:
        """Return when every save is durable or skipped; raises the first error of one that failed, or TimeoutError."""
        if self.client is None or self.elsewhere:
            return
        left_s = time_left(timeout)
        with self.steps.waiting():
            self._join(timeout)
            for handle in self.client.pending:
                with suppress(SaveSkipped):
                    handle.result(left_s())
            # Pinning in the background ends the capture of a CUDA graph as well.
            self.client.arena.join(left_s())
        self.client.calls.run(self.client.raise_failure)
        self.session.end(self.client.unreplicable)

    def close(self, timeout: float | None) -> None:
        """Return when every save is durable, and end the saver. Raises the error of a save, or TimeoutError."""
        failed = self.steps.closing()
        if (overlap := self.overlap) is not None:
            overlap.end_copy(timeout)
            self.overlap = None  # before its hook is removed: without it, a step would not wait
            overlap.close()
        if (client := self.client) is None:
            return
        client.calls.run(client.stop, failed)
        try:
            try:
                client.wait_stopped(timeout)
            except TimeoutError:
                client.calls.run(client.raise_failure)  # the cause, if it is known
                raise
            client.calls.run(client.arena.close)
            if self._looking is not None and self.newest is not None and self.newest.done():
                self._looking.join()
            client.calls.run(client.raise_failure)
            self.session.end(client.unreplicable)
        except (CkptError, TimeoutError):
            self.client = None
            raise
        self.client = None
        client.calls.close()

    def _saving_client(self) -> SaveClient:
        if self.elsewhere:
            raise InvalidRequest("this Checkpointer belongs to another process", "Make one after the fork")
        config = self._config
        if config.read_only:
            raise InvalidRequest(
                f"{config.source} is a daemon, which serves reads only", "Pass the store's URL as store="
            )
        if self.client is None:
            assert isinstance(self._source, StoreSource)
            setup = config.setup(self._world().rank, self._world().size)
            if self.agreement.publishes:
                setup = msgspec.structs.replace(setup, deltas=True, heartbeat_s=0.0, retain_snapshot_s=0.0)
            self.client = SaveClient(setup, config.in_process, config.slots, self.tally, self.steps)
            if self._expedited:
                self.client.calls.run(self.client.send, Expedite())
        return self.client

    def _gate(self, state: TrainState) -> Overlap | None:
        if state.optimizers and self._config.overlap and self.overlap is None:
            from ckpt.snapshot.overlap import Overlap  # loads torch

            self.overlap = Overlap(self._config.overlap == "verify", self.steps.stepping)
        if self.overlap is not None:
            self.overlap.expect(chain(*state.optimizers.values()))
            self.steps.count(chain(*state.optimizers.values()))
        return self.overlap if state.optimizers else None

    def meet(self, together: bool = True) -> None:
        """The hosts of the job meet, once, where each has a local tier of its own. A collective of all ranks.

        together: whether all ranks call it; otherwise it raises InvalidRequest where others have to.
        """
        if not self._met:
            if not together and self._world().size > 1:
                raise InvalidRequest(
                    "the hosts of this job have not met, so the newest checkpoint is not known",
                    "Call restore() or prepare() before, on all ranks",
                )
            from ckpt.ranks.hosts import join_hosts  # loads an HTTP client

            assert isinstance(self._source, TieredSource)
            join_hosts(self._world(), self._source, self._config.run_name, self._config.replicas or 0)
            self._met = True

    def _join(self, timeout: float | None = None) -> None:
        """Wait until a pending copy is submitted to the saver, or has failed."""
        if self.overlap is not None:
            self.overlap.join(timeout)
