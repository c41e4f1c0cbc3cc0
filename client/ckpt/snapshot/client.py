"""The trainer's side of saving: slots, handles, and what became of earlier saves.

All public methods belong to the training thread; reports arrive on the writer's threads.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckpt.config import OnBusy
from ckpt.saver.commit import abort_attempts, describe
from ckpt.saver.messages import Done, Failed, Released, Report, SaveJob, SaveProgress, Setup
from ckpt.saver.segment import Segment
from ckpt.saver.streaming import StreamWriter
from ckpt.snapshot.arena import Arena, ArenaSlot
from ckpt.snapshot.counters import LiveCounters
from ckpt.snapshot.handle import SaveHandle
from ckpt.snapshot.writers import ProcessWriter, SaveWriter, ThreadWriter
from ckptapi.arbiter import arbitrated
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, from_outcome
from ckptstore.errors import CkptError, SaverDied, SaveSkipped, error_from_code
from ckptstore.format.documents import Outcome
from ckptstore.format.parsing import parse_sealed
from ckptstore.names import Attempt
from ckptstore.stores import open_store

logger = logging.getLogger(__name__)


"""What becomes of a save when all slots are in use."""

_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class PendingJob:
    """A job before its snapshot is copied. What failed is told by its number and attempt; the rest may be missing."""

    number: int
    attempt: Attempt
    complete: Callable[[], SaveJob]

    @staticmethod
    def of(job: SaveJob) -> PendingJob:
        """The draft of a job that is complete already."""
        return PendingJob(job.number, job.attempt, lambda: job)


@dataclass(slots=True)
class _JobState:
    """A job in the writer's hands."""

    handle: SaveHandle
    attempt: Attempt
    slot: int | None
    """None: it uses none any more."""
    released: bool = False
    """This rank has done its part."""


class SaveClient:
    """An arena and handles around one writer, which is replaced when it has died."""

    def __init__(
        self, setup: Setup, in_process: bool, num_slots: int, slot_bytes: int | None, counters: LiveCounters
    ) -> None:
        self._setup = setup
        self._most_bytes = slot_bytes
        self._counters = counters
        self._in_process = in_process
        self._arena = Arena(num_slots, self)
        self._lock = threading.Lock()
        self._jobs: dict[int, _JobState] = {}
        self._finished: list[SaveHandle] = []
        self._deaths: list[SaverDied] = []
        self._numbers = 0
        self._writer: SaveWriter | None = None

    @property
    def pending(self) -> list[SaveHandle]:
        """Saves under way, oldest first."""
        with self._lock:
            return [one.handle for one in self._jobs.values()]

    @property
    def saver_pid(self) -> int | None:
        """Process id of the saver, if there is one."""
        writer = self._writer
        return writer.pid if isinstance(writer, ProcessWriter) else None

    def start(self) -> SaveWriter:
        """The writer, started unless it runs."""
        writer = self._writer
        if writer is None:
            if self._in_process:
                writer = ThreadWriter(self._setup, self._on_report)
            else:
                writer = ProcessWriter(self._setup, self._on_report, self._on_death)
            for number, segment in self._arena.segments.items():
                writer.add_slot(number, segment)
            self._writer = writer
        return writer

    def raise_failure(self) -> None:
        """Raise the death of a saver or the error of an earlier save that nobody has seen yet; the rest is logged."""
        with self._lock:
            finished, self._finished = self._finished, []
            errors: list[CkptError] = [*self._deaths]
            self._deaths = []
        errors += [error for handle in finished if (error := handle._unseen_error) is not None]
        for error in errors[1:]:
            logger.error("another background save failed: %s", error)
        if errors:
            raise errors[0]

    def expect(self, num_bytes: int, gpu: torch.device | None, wait: bool = False) -> None:
        """Have slots for snapshots of this size made in the background, of what a GPU has if one is given.

        wait: return when there is one.
        """
        self._arena.expect(self._slot_bytes(num_bytes), gpu, wait)

    def acquire(self, num_bytes: int, on_busy: OnBusy, step: int) -> ArenaSlot | None:
        """An idle slot for a save of `step`. If all are in use: None ("skip"), or one after waiting for it ("wait").

        It is smaller than the snapshot if no slot may be so large: then the snapshot is to be streamed.
        "supersede" takes the oldest save that only waits for its turn out of the queue, and waits if there is none.
        """
        num_bytes = self._slot_bytes(num_bytes)
        if on_busy != "wait":
            slot = self._arena.acquire(num_bytes, 0.0)
            if slot is not None or on_busy == "skip":
                return slot
            self.start().withdraw(step)
        while (slot := self._arena.acquire(num_bytes, _PATIENCE_S)) is None:
            logger.warning("training waits for an idle slot: saves take longer than the interval between them")
        return slot

    def release(self, slot: ArenaSlot) -> None:
        """Give a slot back that no job was submitted for."""
        self._arena.release(slot.number)

    def skip(self, attempt: Attempt, handle: SaveHandle) -> None:
        """Finish a handle without a save; the other ranks hear of it."""
        self.start().abort(attempt)
        self._end_with(handle, SaveSkipped("the save was skipped: all slots were in use by earlier saves"))

    def abandon(self, pending_job: PendingJob, handle: SaveHandle, slot: ArenaSlot, error: CkptError) -> None:
        """A save failed before its job was submitted, or at the end of its stream; the next call raises the error, and
        the other ranks hear of it."""
        if handle.done():
            return  # the stream had failed already
        with self._lock:
            self._finished.append(handle)
            streamed = pending_job.number in self._jobs
        self._end_with(handle, error)
        self.start().abort(pending_job.attempt, describe(error))
        if streamed:
            self.cut(pending_job.number)  # the saver says when it has let go of the slot
        else:
            self._arena.release(slot.number)

    def next_number(self) -> int:
        """A number for a job."""
        self._numbers += 1
        return self._numbers

    def submit(self, job: SaveJob, handle: SaveHandle) -> None:
        """Hand a staged snapshot over, or the end of a streamed one; from now on its slot is the writer's."""
        if handle._stream_writer is None:
            self._send(job, handle)
        else:
            self.staged(job.number, len(handle._stream_writer.spans))
        handle._hand_over()
        self._arena.prepare_rest()

    def stream(self, job: SaveJob, handle: SaveHandle, stream_writer: StreamWriter) -> None:
        """Announce a snapshot that will pass through its slot; until all of it has, it is lost if this process dies."""
        handle._stream_writer = stream_writer
        self._send(job, handle)

    def staged(self, number: int, chunks: int) -> None:
        """So many chunks of a streamed job were copied."""
        if (writer := self._writer) is not None:
            writer.staged(number, chunks)

    def cut(self, number: int) -> None:
        """The rest of a streamed job will not be copied: the save fails, unless it has already."""
        if (writer := self._writer) is not None:
            writer.cut(number)

    def seen(self, handle: SaveHandle) -> None:
        """The error of a save was raised already."""
        error = handle.exception()
        with self._lock:
            self._deaths = [death for death in self._deaths if death is not error]

    def close(self, timeout_s: float | None) -> None:
        """Wait until every save is durable or has failed, then end the writer and give the arena back.

        Raises TimeoutError if that takes longer; a saver process then goes on by itself.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(timeout_s)
        self._arena.close()

    def _slot_bytes(self, num_bytes: int) -> int:
        limit = self._most_bytes
        if limit is None or num_bytes <= limit:
            return num_bytes
        self._arena.limit(1)  # a snapshot that passes through one waits for the one before in any case
        return limit

    def _send(self, job: SaveJob, handle: SaveHandle) -> None:
        writer = self.start()
        with self._lock:
            self._jobs[job.number] = _JobState(handle, job.attempt, job.slot)
        writer.submit(job)
        if self._writer is not writer:
            self._on_missed_death(job.number)

    # What the arena tells.

    def add_slot(self, number: int, segment: Segment) -> None:
        """Make a new slot known to the writer."""
        if self._writer is not None:
            self._writer.add_slot(number, segment)

    def forget_slot(self, number: int) -> None:
        """Tell the writer of a slot that is gone."""
        if self._writer is not None:
            self._writer.forget_slot(number)

    # What the writer tells.

    def _on_report(self, report: Report) -> None:
        with self._lock:
            if report.number not in self._jobs:
                return  # given up already
            one = self._jobs[report.number]
            slot = one.slot
            if isinstance(report, Released):
                one.slot, one.released = None, True
            elif isinstance(report, Done | Failed):
                del self._jobs[report.number]
                if not one.handle.done():
                    self._finished.append(one.handle)
        if slot is not None and isinstance(report, Released | Failed):
            self._arena.release(slot)
        self._apply(one.handle, report)

    def _on_death(self, error: SaverDied) -> None:
        with self._lock:
            self._writer = None
            self._deaths.append(error)
            lost, self._jobs = list(self._jobs.values()), {}
        self._fail_lost(lost, error)

    def _on_missed_death(self, number: int) -> None:
        """The writer died, and its death was reported, just before this job was known to be under way."""
        with self._lock:
            one = self._jobs.pop(number, None)
        if one is not None:
            self._fail_lost([one], SaverDied("the saver process died", "The next save starts a new one"))

    def _fail_lost(self, lost: Sequence[_JobState], error: SaverDied) -> None:
        for one in lost:
            if one.slot is not None:
                self._arena.release(one.slot)
            self._end_with(one.handle, error)
        attempts = [one.attempt for one in lost if not one.released]
        if attempts and self._setup.world_size > 1:
            threading.Thread(target=self._abort_attempts, args=(attempts, describe(error)), name="ckpt-decline").start()

    def _abort_attempts(self, attempts: Sequence[Attempt], failure: str) -> None:
        """What a saver would do, for one that is dead."""
        setup = self._setup
        store = arbitrated(open_store(setup.store, setup.options), setup.daemon, setup.token)
        abort_attempts(store, setup, attempts, failure, system_clock)

    def _end_with(self, handle: SaveHandle, error: CkptError) -> None:
        if handle.done():
            return  # a stream that was cut
        self._counters.add(**{"skipped" if isinstance(error, SaveSkipped) else "failed": 1})
        handle._fail(error)

    def _apply(self, handle: SaveHandle, report: Report) -> None:
        if isinstance(report, SaveProgress):
            handle._advance(report.done_bytes)
        elif isinstance(report, Released):
            logger.debug("step %d: %s", handle.step, report.coding)
            handle._measure(
                queue_s=report.queue_s,
                encode_s=report.encode_s,
                upload_s=report.upload_s,
                cpu_s=report.cpu_s,
                stored_bytes=report.stored_bytes,
                referenced_bytes=report.referenced_bytes,
            )
        elif isinstance(report, Done):
            handle._measure(commit_s=report.commit_s)
            checkpoint = from_outcome(parse_sealed(report.outcome.encode(), Outcome, "the saver's report"))
            assert checkpoint is not None
            self._committed(handle, checkpoint)
        else:
            self._end_with(handle, error_from_code(report.code, report.message, report.hint))

    def _committed(self, handle: SaveHandle, checkpoint: Checkpoint) -> None:
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
                human.size(checkpoint.stored_bytes), human.size(checkpoint.referenced_bytes), handle._age_s,
            )  # fmt: skip
        handle._succeed(checkpoint)
