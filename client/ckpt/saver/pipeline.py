"""The save pipeline: encode, upload, receipt, commit.

Jobs are encoded and uploaded one at a time, in order. A separate thread waits for other
ranks, so that this never delays the next upload; it commits jobs as they are complete, in any order.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from itertools import chain, count
from typing import Any

from msgspec.structs import replace

from ckpt.host.lock import note_checkpoint
from ckpt.host.segment import Segment
from ckpt.saver.commit import Committer, Numbering, abort_attempts, describe, notify
from ckpt.saver.deriving import Derived, divide, divide_by_use, in_stream
from ckpt.saver.encode import CpuThrottle, encode_by, encode_stream
from ckpt.saver.heartbeat_writer import HeartbeatWriter, SharedStep
from ckpt.saver.incremental import ChunkIndex, IncrementalSave, ignore
from ckpt.saver.messages import (
    Abort,
    Command,
    Done,
    DropQueued,
    Expedite,
    Failed,
    Forget,
    LocalOnly,
    Released,
    Report,
    SaveJob,
    SaveProgress,
    Setup,
    Slot,
    TrainerStarted,
    Warned,
)
from ckpt.saver.replicator import REQUEST_RETRY_S, LocalQuota, Replicator, ShardReplicator
from ckpt.saver.retained_snapshot import SlotContents
from ckpt.saver.statistics import ChunkTables, ShardStatistics
from ckptapi.remote_create import with_remote_create
from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.codecs.chunk_codecs import POLICIES, CodingPolicy
from ckptstore.commits.commit import EARLIER, write_receipt
from ckptstore.commits.generations import NewAttempt
from ckptstore.commits.leases import end_lease
from ckptstore.errors import CkptError, CorruptObject, ReferenceLost, SaveFailed, SaveSkipped, UnsupportedObject
from ckptstore.format.documents import BASES, OPTIMIZER, Content, Outcome, Receipt
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.shards import (
    CHUNK_BYTES,
    ChunkSpan,
    EncodedChunk,
    Placed,
    RawStream,
    plan_chunks,
    slice_tables,
)
from ckptstore.format.statistics import warning_of
from ckptstore.names import Attempt
from ckptstore.retention.policy import policy_for, read_policies
from ckptstore.run import Run
from ckptstore.stores import Store, is_local, open_store
from ckptstore.stores.retrying import RetryingStore
from ckptstore.threads import start_daemon
from ckptstore.tiers.source import LOCAL, REMOTE, part_of_lease
from ckptstore.values import Value

logger = logging.getLogger(__name__)


class Uploaded(Value):
    """A durable shard."""

    chunks: list[EncodedChunk]
    """Without their data."""
    upload_s: float
    """Seconds spent in calls of the store; waiting for chunks is not included."""

    @property
    def stored_bytes(self) -> int:
        """Without the tail, which begins there."""
        return sum(chunk.stored for chunk in self.chunks)


def upload_shard(
    store: Store,
    key: str,
    raw_bytes: int,
    chunks: Iterable[EncodedChunk],
    progress: Callable[[int], None],
    tail: Callable[[], bytes] = bytes,
) -> Uploaded:
    """Write the shard; durable on return, removed on an error.

    progress: called with the raw bytes written so far, about once per 4 CHUNK_BYTES and with the total. tail: called
    after the last chunk; what it returns is written behind it.
    """
    written: list[EncodedChunk] = []
    spent, done, due = 0.0, 0, 0
    started = time.perf_counter()
    with store.open_writer(key, size_hint=raw_bytes) as writer:
        spent += time.perf_counter() - started
        for chunk in chunks:
            started = time.perf_counter()
            writer.write(chunk.data)
            spent += time.perf_counter() - started
            done += chunk.raw
            written.append(replace(chunk, data=b""))
            if done >= due or done == raw_bytes:  # a message costs as much as hashing 1 MB
                due = done + 4 * CHUNK_BYTES
                progress(done)
        last = tail()
        started = time.perf_counter()
        writer.write(last)
    spent += time.perf_counter() - started
    return Uploaded(written, spent)


_NOTIFY_S = 1.0
"""How long `close` waits for the last notification of the daemon."""
_Encoded = Callable[[bool], Generator[EncodedChunk, None, None]]
"""The chunks of a job, encoded as they are consumed; True: once more, for a retry."""


def coding_policy(compress: str, url: str) -> CodingPolicy:
    """The coding of each element type for a value of `compress`. auto: off for a store on this host, else fast."""
    if compress == "auto":
        compress = "off" if is_local(url) else "fast"
    return POLICIES[compress]


class _Part(Value):
    """The slices of a job that one shard stores."""

    placed: list[Placed]
    incremental: IncrementalSave


class _RunningJob(Value):
    """A job in the pipeline, and its chunks."""

    job: SaveJob
    parts: list[_Part]
    """The part that a thinned checkpoint keeps, then, if it is large, the other one."""
    derived: list[Derived]
    """The slices that are not stored, since they are casts of stored ones."""
    statistics: ShardStatistics | None
    """None: none are taken."""
    received_at: float
    begun_at: float
    begun_cpu_s: float
    """CPU time of the process by then."""

    def end(self, receipt: Receipt | None) -> None:
        """End its comparisons. receipt: committed; None: it is not."""
        for part in self.parts:
            part.incremental.end(receipt)


def open_saved(setup: Setup) -> Store:
    """The store that a saver writes to: `setup.store`. Raises InvalidRequest or StoreUnavailable."""
    if setup.remote is None:
        return open_store(setup.store, setup.options, retried=setup.retry_s > 0)
    from ckptapi.hosts import open_local  # loads an HTTP client

    return open_local(setup.store, setup.options, retried=setup.retry_s > 0)


class SavePipeline:
    """Makes snapshots durable, in the saver process or in threads of the trainer.

    One thread at a time sends jobs and calls close; the other methods may be called from any thread. `report` is called
    from the pipeline's own threads and from `carry_out`.
    """

    def __init__(
        self,
        store: Store,
        setup: Setup,
        report: Callable[[Report], None],
        clock: Clock = system_clock,
        own_process: bool = False,
    ) -> None:
        """own_process: the process runs nothing but this pipeline, so that its CPU time is that of the saves.

        store: that of `setup`.
        """
        self.segments: dict[int, Segment] = {}
        """The memory of the slots."""
        warn: Callable[[str], object] = lambda message: report(Warned(message))  # noqa: E731
        self._store = RetryingStore(store, setup.retry_s, warn=warn)
        # Where a store ignores If-None-Match, the daemon decides: for its own store, the remote one if there are two.
        daemon = setup.daemon if setup.remote is None else None
        self._run = Run(with_remote_create(self._store, daemon, setup.token), setup.run, clock)
        remote = None
        if setup.remote is not None:
            opened = open_store(setup.remote, setup.remote_options, retried=True)
            patient = RetryingStore(opened, min(setup.retry_s, REQUEST_RETRY_S))
            remote = Run(with_remote_create(patient, setup.daemon, setup.token), setup.run, clock)
        self.heartbeats = HeartbeatWriter(
            remote or self._run, 0.0 if setup.rank else setup.heartbeat_s, remote is not None, setup.world_size
        )
        self._policies = (remote or self._run).store
        self._numbering = Numbering(self._run, warn)
        self._setup = setup
        self._report = report
        self._notifying: threading.Thread | None = None
        self._quota = LocalQuota(self._run, setup) if remote is not None else None
        self._replicator: Replicator | None = None
        if remote is not None and (setup.rank == 0 or setup.replicas is not None):
            kind = ShardReplicator if setup.rank else Replicator
            self._replicator = kind(self._run, remote, setup, self._numbering, self._replicator_reports, self._notify)
        self._own_process = own_process
        self._throttle = CpuThrottle(setup.cpu_budget if own_process else None)
        self.contents = SlotContents(enabled=own_process and setup.retain_snapshot_s > 0)
        """The snapshots in the slots, if their memory is of use after an upload."""
        self._policy = coding_policy(setup.compress, store.url)
        self._lock = threading.Lock()
        self._leases: set[str] = set()
        self._noted = self._warned = False
        self._waiting: dict[int, SaveJob] = {}
        """Jobs whose upload has not begun."""
        self._uploads = ThreadPoolExecutor(1, thread_name_prefix="ckpt-upload")
        self._committer = Committer(self._run, setup, warn)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="ckpt-background")
        self._chunk_indexes = [ChunkIndex(self._run, setup, optimizer) for optimizer in (False, True)]
        self._known_statistics: ChunkTables = {}
        """Statistics of the chunks of the last save."""

    def carry_out(self, command: Command, memory: Any = None) -> None:
        """Carry out a command, except for Setup and Stop.

        memory: the Segment of a Slot or TrainerStarted, or the RawStream of a SaveJob whose state is not in a slot.
        """
        match command:
            case SaveJob():
                if command.slot is not None:
                    memory = self.segments[command.slot].view.toreadonly()
                self.submit(command, memoryview(b"") if memory is None else memory)
            case Slot():
                self.segments[command.number] = memory
            case Forget():
                self.segments.pop(command.slot).close()
            case TrainerStarted():
                self.heartbeats.begin(command, SharedStep(memory))
            case DropQueued():
                self._drop_queued(f"the save was superseded by step {command.step} before its upload began")
            case Expedite():
                self._expedite()
            case Abort():
                self._abort(command.attempt, command.failure)

    def submit(self, job: SaveJob, raw: RawStream) -> None:
        """Accept a snapshot; its slot stays in use until Released or Failed is reported.

        raw: read only; masters and casts of a state that is not in memory as a whole are not compared. If it can
        change while it is read, its `check` raises.
        """
        self.heartbeats.captured(job.attempt.step, job.created_at)
        if job.lease is not None:
            self._leases.add(job.lease)
        self.contents.submitted(job)
        with self._lock:
            self._waiting[job.number] = job
        self._uploads.submit(self._upload, job, raw, time.perf_counter())

    def _begin(self, job: SaveJob, raw: RawStream, received_at: float) -> tuple[_RunningJob, list[_Encoded]]:
        # The memory of the slot must not outlive its use: the job does not hold it.
        began = time.perf_counter(), time.process_time()
        placed, derived = job.slices, list[Derived]()
        if self._setup.dedup_casts and isinstance(raw, memoryview):
            placed, derived = divide(placed, raw)
        divided = divide_by_use(placed, derived)
        if divided[1] and not self._may_be_thinned:
            divided = placed, []
        spans = [*map(plan_chunks, divided)]
        plain = encode_by(self._policy, self.contents.enabled or self._chunk_indexes[0].deltas, self._throttle)
        statistics, encode, unchanged = None, plain, ignore
        if self._setup.statistics:
            statistics = ShardStatistics(self._known_statistics, raw, [*chain(*divided)], [*chain(*spans)], derived)
            self._known_statistics = statistics.chunks
            encode, unchanged = statistics.observing(plain), statistics.unchanged
        check: Callable[[], object] = getattr(raw, "check", list)

        def begin(index: ChunkIndex, placed: list[Placed], spans: Sequence[ChunkSpan]) -> tuple[_Part, _Encoded]:
            incremental = index.begin(job.attempt, raw, placed, spans, plain)
            coded = incremental.deltas(encode) if index.deltas else encode

            def encoded(again: bool) -> Generator[EncodedChunk, None, None]:
                yield from encode_stream(incremental.changed(raw, ignore if again else unchanged), coded)
                check()  # before the receipt, which others may commit

            return _Part(placed, incremental), encoded

        begun = [begin(*one) for one in zip(self._chunk_indexes, divided, spans, strict=True) if one[1] or not placed]
        parts, encoded = [part for part, _ in begun], [chunks for _, chunks in begun]
        return _RunningJob(job, parts, derived, statistics, received_at, *began), encoded

    @cached_property
    def _may_be_thinned(self) -> bool:
        """Whether a policy in force at the first save of this saver thins the run; if not, a rank writes one file."""
        try:
            found = read_policies(self._policies)
        except CkptError as error:
            logger.warning("this run cannot be thinned, because its policy is not known: %s", error)
            return False
        policy = policy_for(found.policies, self._run.name)
        return policy is not None and bool(policy.keep_full or policy.keep_weights)

    def _drop_queued(self, reason: str) -> bool:
        """Skip the oldest job with a slot whose upload has not begun; whether there is one."""
        with self._lock:
            job = next((job for job in self._waiting.values() if job.slot is not None), None)
            if job is None:
                return False
            del self._waiting[job.number]
        self._abort_job(job, SaveSkipped(reason))
        return True

    def _expedite(self) -> None:
        """Make the next save durable as soon as possible: with no compression, CPU limit, replication, queued
        uploads."""
        self._throttle.lift()
        self._committer.expedite()
        if self._replicator is not None:
            self._replicator.pause()
        self._policy = POLICIES["off"]
        while self._drop_queued("the save was dropped before its upload began: the trainer is being preempted"):
            pass

    def _abort(self, attempt: NewAttempt, failure: str | None) -> None:
        """Abort an attempt in the background, so that other ranks, if there are any, do not wait for this one."""
        if self._setup.world_size > 1:
            self._background.submit(abort_attempts, self._numbering, self._setup.rank, [attempt], failure)

    def finish_uploads(self) -> None:
        """Return when every shard and receipt of this rank is durable or failed: the slots are no longer read.

        Without other ranks to wait for, every job is committed or has failed.
        """
        if self._quota is not None:
            self._quota.end()
        self._uploads.shutdown(wait=True)
        if self._setup.world_size == 1:
            self._committer.close()

    def close(self) -> None:
        """Return when every submitted job is committed or has failed."""
        self.finish_uploads()
        self._committer.close()
        self._background.shutdown(wait=True)
        self.heartbeats.finish()
        if self._replicator is not None:
            self._replicator.finish()
        self.heartbeats.close()
        if self._notifying is not None:
            self._notifying.join(_NOTIFY_S)

    def _upload(self, job: SaveJob, raw: RawStream, received_at: float) -> None:
        running = None
        with self._lock:
            if self._waiting.pop(job.number, None) is None:
                return  # dropped
        try:
            attempt = self._numbering.attempt(job.attempt)
            self.heartbeats.numbered(attempt.generation, job.created_at)
            running, encoded = self._begin(job, raw, received_at)
            receipt, released = self._make_durable(running, attempt, encoded)
            self._report(released)
        except BaseException as error:
            if running is not None:
                running.end(None)
            self._abort_job(job, error)
            return
        ended = partial(self._end, running, receipt, time.perf_counter())
        self._committer.add(attempt, receipt, ended)

    def _make_durable(
        self, running: _RunningJob, attempt: Attempt, encoded: Sequence[_Encoded]
    ) -> tuple[StoredReceipt, Released]:
        job, parts = running.job, running.parts
        uploads: list[Uploaded] = []
        for part, chunks in reversed([*zip(parts, encoded, strict=True)]):  # the first ends with the statistics of all
            uploads.insert(0, self._upload_shard(running, part, attempt, chunks, uploads))
        shards = [one.incremental.shard(up.chunks) for one, up in zip(parts, uploads, strict=True) if one.placed]
        extensions = dict(job.extensions)
        if running.statistics is not None and shards:
            apart = not uploads[0].chunks or names.is_optimizer_shard(shards[0].name)
            offset = None if apart else uploads[0].stored_bytes
            extensions |= running.statistics.extensions(self._run, attempt, self._setup.rank, offset)
        if self._setup.rank == 0 and (earlier := job.attempt.earlier(attempt.generation)):
            extensions[EARLIER] = list(map(str, earlier))
        if any(shard.bases for shard in shards):
            extensions[BASES] = True
        if shards and names.is_optimizer_shard(shards[-1].name):
            extensions[OPTIMIZER] = True
        stored, derived = in_stream(parts[0].placed, running.derived)
        second = [in_stream(part.placed, ())[0] for part in parts[1:]]
        entries, slices = slice_tables(stored, derived, *second)
        content = Content(shards=shards, entries=entries, slices=slices, aliases=job.aliases, trees=job.trees)
        receipt = write_receipt(
            self._run, attempt, content, job.created_at, self._setup.rank, self._setup.world_size,
            local=job.local, metrics=job.metrics, extensions=extensions,
        )  # fmt: skip
        digests = [one.incremental.raw_digests(up.chunks) for one, up in zip(parts, uploads, strict=True)]
        self.contents.uploaded(job, attempt, shards, [*chain(*digests)])
        total, upload_s = time.perf_counter() - running.begun_at, sum(one.upload_s for one in uploads)
        timings = {
            "queue_s": running.begun_at - running.received_at,
            "encode_s": max(0.0, total - upload_s),
            "upload_s": upload_s,
            "cpu_s": time.process_time() - running.begun_cpu_s if self._own_process else 0.0,
            "stored_bytes": sum(one.stored_bytes for one in uploads),
            "referenced_bytes": sum(shard.referenced_bytes for shard in shards),
        }
        return receipt, Released(job.number, timings, self._store.take_retries())

    def _upload_shard(
        self, running: _RunningJob, part: _Part, attempt: Attempt, encoded: _Encoded, before: Sequence[Uploaded]
    ) -> Uploaded:
        """Upload a shard, unless no chunk has to be stored. before: the job's others that were."""
        with closing(encoded(False)) as ahead:
            if (first := next(ahead, None)) is None:
                return Uploaded([], 0.0)
            optimizer = part.incremental.index.optimizer
            key, tries = self._run.keys.shard(attempt, names.shard_name(self._setup.rank, optimizer)), count()
            statistics, number, changed = running.statistics, running.job.number, part.incremental.changed_bytes
            left = sum(one.incremental.changed_bytes for one in running.parts)
            rest = sum(place.slice.bytes for place in running.job.slices) - left  # referenced or derived
            rest += sum(chunk.raw for one in before for chunk in one.chunks)
            tail: Callable[[], bytes] = bytes
            if statistics is not None and not optimizer:
                tail = partial(statistics.document, attempt, self._setup.rank)

            def progress(done: int) -> None:
                self._report(SaveProgress(number, rest + done))

            def write(chunks: Iterable[EncodedChunk]) -> Uploaded:
                return upload_shard(self._run.store, key, changed, chunks, progress, tail)

            def upload() -> Uploaded:
                if not next(tries):
                    return write(chain([first], ahead))
                ahead.close()
                self._store.delete_many([key])  # what the failed try may have left
                with closing(encoded(True)) as again:
                    return write(again)

            def persist() -> Uploaded:
                return upload() if self._store.resumes_uploads else self._store.repeat(upload)

            return persist() if self._quota is None else self._quota.write(changed, persist)

    def _end(
        self, running: _RunningJob, receipt: StoredReceipt, started: float, result: Outcome | BaseException
    ) -> None:
        """End a job whose receipt is durable. started: of the commit; result: the outcome, or why there is none."""
        job = running.job
        if isinstance(result, BaseException):
            running.end(None)
            if isinstance(result, ReferenceLost):
                for index in self._chunk_indexes:
                    index.forget()
            self._fail(job, result)
            if self._setup.rank == 0 and isinstance(result, ReferenceLost | CorruptObject | UnsupportedObject):
                self._abort(job.attempt, describe(result))  # no other rank could commit it either
            return
        running.end(receipt.receipt)
        self.contents.ended(job.number, committed=True)
        # Rank 0 warns for all ranks of the first NaN or Inf in a checkpoint of this process.
        if not self._setup.rank and not self._warned and (warning := warning_of(result)):
            self._warned = True
            self._report(Warned(warning))
        self.heartbeats.committed(job.attempt.step, job.created_at)
        attempt = Attempt.parse(result.attempt)
        setup, local = self._setup, self._setup.remote is not None
        if self._run.store.shared_between_processes and (local or not self._noted):
            note_checkpoint(setup.home, setup.run, f"{attempt} {setup.store}" if local else "")
        self._noted = True
        if self._replicator is not None:
            self._replicator.committed(attempt)
        self._report(Done(number=job.number, outcome=result, commit_s=time.perf_counter() - started))
        self._release_leases()
        if self._replicator is None:
            self._notify(attempt)

    def _notify(self, attempt: Attempt) -> None:
        if self._setup.daemon is not None and self._setup.rank == 0:  # which commits for all ranks
            self._notifying = start_daemon("ckpt-notify", notify, self._setup, attempt)

    def _replicator_reports(self, report: Report) -> None:
        if isinstance(report, LocalOnly):
            self.heartbeats.local_only(report)
        self._report(report)

    def _release_leases(self) -> None:
        """Release all leases that a commit of this run makes unnecessary, whichever save it was."""
        while self._leases:
            lease = self._leases.pop()
            if self._replicator is not None and (remote := part_of_lease(lease, REMOTE)):
                self._replicator.release(remote)
            if self._setup.remote is not None and not (lease := part_of_lease(lease, LOCAL)):
                continue
            end_lease(self._run, lease)

    def _abort_job(self, job: SaveJob, error: BaseException) -> None:
        """Fail a job that will never have a receipt, and abort its attempt."""
        self._fail(job, error)
        self._abort(job.attempt, None if isinstance(error, SaveSkipped) else describe(error))

    def _fail(self, job: SaveJob, error: BaseException) -> None:
        if not isinstance(error, SaveSkipped):
            logger.error("save of step %d failed", job.attempt.step, exc_info=error)
        self.contents.ended(job.number, committed=False)
        known = error if isinstance(error, CkptError) else SaveFailed(describe(error))
        self._report(Failed(number=job.number, code=known.code, message=known.message, hint=known.hint))
