"""The trainer's side of saving: slots, handles, and the outcome of earlier saves.

Threads: `SaveClient.calls` makes all calls that change something, one after the other, also the copies of Overlap, and
no exception of a signal handler interrupts them. A slot belongs to the snapshot that was given it last until that is
handed over, to its copy or to the writer; then only the end of the copy or a report of the writer releases it.
Reports arrive on the writer's threads at any time.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import msgspec

from ckpt.capture.leaves import Captured
from ckpt.host.segment import Segment
from ckpt.saver.commit import Numbering, abort_attempts, describe
from ckpt.saver.messages import (
    Abort,
    Command,
    Done,
    Failed,
    Forget,
    LocalOnly,
    Released,
    Report,
    SaveJob,
    SaveProgress,
    Setup,
    Slot,
    Unreplicable,
    Warned,
)
from ckpt.snapshot.arena import Arena, ArenaSlot
from ckpt.snapshot.costs import StepClock
from ckpt.snapshot.handle import LiveCounters, LiveHandle, SaveHandle, time_left
from ckpt.snapshot.live import LiveState
from ckpt.snapshot.stage import SnapshotLayout
from ckpt.snapshot.writers import ProcessWriter, SaveWriter, ThreadWriter
from ckptapi.remote_create import with_remote_create
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import from_outcome
from ckptstore.commits.generations import NewAttempt
from ckptstore.errors import CkptError, InvalidRequest, RankFailed, SaverDied, SaveSkipped, Superseded, error_from_code
from ckptstore.format.documents import REPLICAS, Outcome
from ckptstore.format.records import SAVE_COST, SaveCost
from ckptstore.run import Run
from ckptstore.stores.retrying import RetryingStore
from ckptstore.threads import CallThread
from ckptstore.tiers.source import LOCAL

logger = logging.getLogger(__name__)


def finite(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """The finite metrics: a diverged loss must not lose the checkpoint."""
    numbers: dict[str, float] = {}
    for name, value in (metrics or {}).items():
        try:
            numbers[name] = float(value)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"metric {name!r} is not a number: {error}", "Pass numbers; texts as an extra"
            ) from error
    if lost := sorted(name for name, value in numbers.items() if not math.isfinite(value)):
        logger.warning("metrics that are not finite are not kept: %s", lost)
    return {name: value for name, value in numbers.items() if name not in lost}


@dataclass(slots=True, eq=False)
class Snapshot:
    """One save, from its capture until the saver has all of it. Used by one thread at a time."""

    attempt: NewAttempt
    captured: Captured
    layout: SnapshotLayout
    handle: LiveHandle
    metrics: Mapping[str, float]
    lease: str | None
    """A lease to release once this save is committed."""
    cost_before: SaveCost | None
    """The cost of the save before this one."""
    created_at: float = field(default_factory=system_clock)
    submitted: bool = False
    """The writer has the job, or will get it."""
    slot: ArenaSlot | None = None
    """None: this rank has no shard, its state is not copied, or the writer no longer reads the slot."""
    released: bool = False
    """This rank's shard and receipt are durable."""

    def job(self, number: int) -> SaveJob:
        """The message to the saver; the captured tensors are released. Encodes the state that is not in tensors, so
        call it off the training thread if possible."""
        captured, self.captured = self.captured, Captured()
        local, cost = captured.write(), self.cost_before
        extensions = {REPLICAS: captured.replicas, **({} if cost is None else {SAVE_COST: cost})}
        return SaveJob(
            number=number,
            slot=self.slot and self.slot.number,
            attempt=self.attempt,
            created_at=self.created_at,
            slices=self.layout.placed,
            aliases=captured.aliases,
            trees=captured.trees,
            local=local,
            metrics=dict(self.metrics),
            extensions=msgspec.to_builtins(extensions),
            lease=self.lease,
        )


class SaveClient:
    """An arena, the handles of unfinished saves, and one writer, which is replaced if it dies."""

    def __init__(
        self,
        setup: Setup,
        in_process: bool,
        num_slots: int,
        counters: LiveCounters,
        steps: StepClock,
    ) -> None:
        """steps: for heartbeats."""
        self._setup = setup
        self._steps = steps if setup.rank == 0 else None
        self._counters = counters
        self._in_process = in_process
        self.calls = CallThread("ckpt-save")
        self.arena = Arena(num_slots, self._announce)
        self._staging: Snapshot | None = None
        """The snapshot that has a slot and is not handed over. If its save was interrupted, the next one takes it."""
        self._stopping: list[SaveWriter] = []
        self._lock = threading.Lock()
        self._jobs: dict[int, Snapshot] = {}
        """Those that the writer has not finished."""
        self._failed: list[LiveHandle] = []
        """Those that have failed, or are about to."""
        self._deaths: list[SaverDied] = []
        self.unreplicable: dict[str, Superseded] = {}
        """By session: why what it has saved locally is not committed remotely."""
        self._numbers = count(1)
        self._live = False
        """A state was saved without a copy."""
        self._writer: SaveWriter | None = None

    @property
    def pending(self) -> list[SaveHandle]:
        """Unfinished saves, oldest first. For any thread."""
        with self._lock:
            return [job.handle for job in self._jobs.values()]

    @property
    def saver_pid(self) -> int | None:
        """Process id of the saver, if there is one. For any thread."""
        writer = self._writer
        return writer.pid if isinstance(writer, ProcessWriter) else None

    def start(self) -> SaveWriter:
        """The writer; starts one if none is running."""
        writer = self._writer
        if writer is None:
            if self._in_process:
                writer = ThreadWriter(self._setup, self._on_report)
            else:
                writer = ProcessWriter(self._setup, self._on_report, self._on_death)
            for number, segment in self.arena.segments.items():
                writer.send(Slot(number, segment.num_bytes), segment)
            self._writer = writer
        if self._steps is not None:
            self._steps.announce(writer)
        return writer

    @property
    def ready(self) -> bool:
        """Whether `begin` would do nothing. For any thread: training need not wait for another one then."""
        return self._writer is not None and not self._deaths and not self._failed

    def begin(self) -> None:
        """A save begins: start a writer if the last one has died, so that saves work again after the error, which this
        raises; see `raise_failure`."""
        self.start()
        self.raise_failure(False)

    def raise_failure(self, of_other_ranks: bool = True) -> None:
        """Raise the death of a saver, or the error of an earlier save that was not read yet. Logs all further ones.

        of_other_ranks: also raise RankFailed. A save does not: it would fail its own step on all ranks because another
        rank failed an earlier one, that rank would do the same in turn, and nothing would ever be committed.
        """
        with self._lock:
            failed = [handle for handle in self._failed if handle.done()]
            self._failed = [handle for handle in self._failed if handle not in failed]
            errors: list[CkptError] = [*self._deaths]
            self._deaths = []
        errors += [error for handle in failed if (error := handle.unseen_error) is not None]
        raised = next((error for error in errors if of_other_ranks or not isinstance(error, RankFailed)), None)
        for error in errors:
            if error is not raised:
                logger.error("a background save failed: %s", error)
        if raised is not None:
            raise raised

    def acquire(self, snapshot: Snapshot) -> bool:
        """Give a snapshot a slot, until it is handed over or another one is given it. False if all are in use."""
        if self._staging is not None:
            self.arena.release(self._staging.slot)
        self._staging = None
        snapshot.slot = self.arena.acquire(snapshot.layout.num_bytes)
        self._staging = snapshot
        return snapshot.slot is not None

    def handed_over(self) -> None:
        """The slot that was acquired last belongs to a copy or to the writer."""
        self._staging = None

    def send(self, command: Command) -> None:
        """Send a command that is about no snapshot."""
        self.start().send(command)

    def skip(self, snapshot: Snapshot) -> None:
        """Finish a handle as skipped, and abort the attempt for the other ranks."""
        self.send(Abort(snapshot.attempt))
        self._fail_handle(snapshot.handle, SaveSkipped("the save was skipped: all slots were in use by earlier saves"))

    @contextmanager
    def declining(self, attempt: NewAttempt) -> Iterator[None]:
        """Abort the attempt in the background if the body raises, so that the other ranks do not wait for this one."""
        try:
            yield
        except BaseException as error:
            self._decline([attempt], error)
            raise

    def abandon(self, snapshot: Snapshot, error: CkptError, keep_slot: bool) -> None:
        """Fail a save before its job was submitted, and abort its attempt for the other ranks. The next save raises
        the error. keep_slot: a device may still write to the slot; it is not used again."""
        with self._lock:
            self._failed.append(snapshot.handle)
        self._fail_handle(snapshot.handle, error)
        self.send(Abort(snapshot.attempt, describe(error)))
        if not keep_slot:
            self.arena.release(snapshot.slot)

    def submit(self, snapshot: Snapshot) -> None:
        """Submit a staged snapshot: from now on its slot belongs to the writer."""
        writer, job = self.start(), self._register(snapshot)
        writer.send(job)
        if self._writer is not writer:  # it died, and its death was reported, just before the job was registered
            with self._lock:
                missed = self._jobs.pop(job.number, None)
            if missed is not None:
                self._fail_lost([missed], SaverDied("the saver process died", "The next save starts a new one"))
        snapshot.handle.mark_staged()
        self.arena.prepare_rest()

    def submit_live(self, snapshot: Snapshot, state: LiveState) -> None:
        """Submit a state that is not copied: it is read until its job is released or has failed."""
        writer, job = self.start(), self._register(snapshot)
        assert isinstance(writer, ThreadWriter)
        writer.send(job, state)

    def use_threads(self, cause: OSError) -> None:
        """From now on the writer is in threads of this process. cause: why; logged once. Call `wait_stopped` then."""
        if not self._live:
            self._live = True
            logger.warning(
                "%s: save_async copies nothing, and returns when the state itself is uploaded", cause.strerror
            )
        if not isinstance(self._writer, ThreadWriter):
            self._in_process = True
            self._stop_writer(retain_snapshot=False)

    def _register(self, snapshot: Snapshot) -> SaveJob:
        job = snapshot.job(next(self._numbers))
        with self._lock:
            self._jobs[job.number] = snapshot
        snapshot.submitted = True
        self.handed_over()
        return job

    def stop(self, retain_snapshot: bool) -> None:
        """Let the writer finish all jobs and end. retain_snapshot: see Stop."""
        if self._steps is not None:
            self._steps.close()
        self._stop_writer(retain_snapshot)

    def _stop_writer(self, retain_snapshot: bool) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            self._stopping.append(writer)
            writer.stop(retain_snapshot)

    def wait_stopped(self, timeout_s: float | None) -> None:
        """Wait for what was stopped. Raises TimeoutError; a saver process then goes on. For the training thread."""
        left_s = time_left(timeout_s)
        for writer in self._stopping:
            if not writer.ended.wait(left_s()):
                more = "; the saver goes on" if isinstance(writer, ProcessWriter) else ""
                raise TimeoutError(f"saves are not durable after {timeout_s} s{more}")

    # Called by the arena, on the thread that allocates a slot or acquires one.

    def _announce(self, change: Slot | Forget, segment: Segment | None) -> None:
        if self._writer is not None:
            self._writer.send(change, segment)

    # Called by the writer, on its own threads.

    def _on_report(self, report: Report) -> None:
        match report:
            case Warned():
                logger.warning(report.message)
            case LocalOnly(checkpoints, num_bytes, since):
                self._counters.set(local_only=checkpoints, local_only_bytes=num_bytes, local_only_since=since)
            case Unreplicable():
                if report.session not in self.unreplicable:
                    logger.error("checkpoints of this job stay local: %s", report.message)
                self.unreplicable[report.session] = Superseded(report.message, report.hint)
            case _:
                self._on_job_report(report)

    def _on_job_report(self, report: SaveProgress | Released | Done | Failed) -> None:
        with self._lock:
            if (job := self._jobs.get(report.number)) is None:
                return  # abandoned already
            slot, handle = job.slot, job.handle
            if isinstance(report, Released):
                job.slot, job.released = None, True
                handle.mark_staged()
            elif isinstance(report, Done | Failed):
                del self._jobs[report.number]
                if isinstance(report, Failed):
                    self._failed.append(handle)
        if isinstance(report, Released | Failed):
            self.arena.release(slot)
        match report:
            case SaveProgress():
                handle.uploaded(report.done_bytes)
            case Released():
                self._counters.add(store_retries=report.retries)
                handle.measure(**report.timings)
            case Done():
                handle.measure(commit_s=report.commit_s)
                self._committed(handle, report.outcome)
            case Failed():
                self._fail_handle(handle, error_from_code(report.code, report.message, report.hint))

    def _on_death(self, error: SaverDied) -> None:
        with self._lock:
            self._writer = None
            self._deaths.append(error)
            lost, self._jobs = list(self._jobs.values()), {}
        self._fail_lost(lost, error)

    def _fail_lost(self, lost: Sequence[Snapshot], error: SaverDied) -> None:
        for job in lost:
            self.arena.release(job.slot)
            self._fail_handle(job.handle, error)
        self._decline([job.attempt for job in lost if not job.released], error)

    def _decline(self, attempts: Sequence[NewAttempt], error: BaseException) -> None:
        """Abort attempts in the background without the saver, which may be dead."""
        if attempts and self._setup.world_size > 1:
            threading.Thread(target=self._abort_attempts, args=(attempts, describe(error)), name="ckpt-abort").start()

    def _abort_attempts(self, attempts: Sequence[NewAttempt], failure: str) -> None:
        from ckpt.saver.pipeline import open_saved  # the trainer needs the pipeline for this only

        setup = self._setup
        opened = RetryingStore(open_saved(setup), setup.retry_s)
        store = with_remote_create(opened, setup.daemon, setup.token)
        abort_attempts(Numbering(Run(store, setup.run), logger.warning), setup.rank, attempts, failure)

    def _fail_handle(self, handle: LiveHandle, error: CkptError) -> None:
        self._counters.add(**{"skipped" if isinstance(error, SaveSkipped) else "failed": 1})
        handle.fail(error)

    def _committed(self, handle: LiveHandle, outcome: Outcome) -> None:
        checkpoint = from_outcome(outcome)
        assert checkpoint is not None
        if self._setup.remote is not None:
            checkpoint = replace(checkpoint, tiers=(LOCAL,))
        timings = handle.timings
        self._counters.add(
            committed=1, raw_bytes=timings.raw_bytes, stored_bytes=timings.stored_bytes,
            referenced_bytes=timings.referenced_bytes, cpu_s=timings.cpu_s,
        )  # fmt: skip
        self._counters.durable(handle.step)
        if self._setup.rank == 0:
            logger.info(
                "run %s step %d is committed as %s: %s, %s stored, %s referenced, %.2f s after save_async was called",
                checkpoint.run, checkpoint.step, checkpoint.id, human.size(checkpoint.raw_bytes),
                human.size(checkpoint.stored_bytes), human.size(checkpoint.referenced_bytes), handle.age_s,
            )  # fmt: skip
        handle.succeed(checkpoint)
