"""StorageWriter: each rank writes its DCP items as a shard, and the coordinator commits.

    all ranks     write_data   encode and upload a shard, then write the receipt
    coordinator   finish       check all results, write its own receipt with the trees of all ranks, then commit

The coordinator's receipt is written last on purpose: an attempt without it is incomplete, so that no other process (a
daemon, the next trainer) commits a save that DCP has reported as failed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Literal

from msgspec.structs import replace as with_fields
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt.dcp.items import RankItems
from ckpt.dcp.naming import nest, parse_checkpoint_id
from ckpt.saver.encode import encode_by, encode_stream
from ckpt.saver.pipeline import upload_shard
from ckptapi.remote_create import with_remote_create
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import POLICIES
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.commit import commit_attempt, read_receipts, write_receipt
from ckptstore.commits.generations import Session, begin_generation, newest_generation
from ckptstore.errors import BadInput, InvalidName, InvalidRequest, SaveFailed
from ckptstore.format.documents import Content, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.shards import chunk_table, raw_bytes, slice_tables
from ckptstore.names import Attempt, RunKeys, check_run, check_step, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.retrying import RetryingStore
from ckptstore.values import Value

_sessions: dict[tuple[str, str], Session] = {}
"""By URL of the store and run: begun by the last load of this process."""


def continue_from(url: str, checkpoint: Checkpoint) -> None:
    """Let saves of the run continue from a checkpoint that was loaded from the store at `url`: in a new generation."""
    _sessions[url, checkpoint.run] = Session(new_ulid(system_clock()), checkpoint.attempt)


def _generation(run: Run) -> int:
    """The generation of the next save, durable on return: the newest one if this process has loaded nothing."""
    session = _sessions.get((run.store.url, run.name))
    return begin_generation(run, session).number if session is not None else newest_generation(run)


class Assignment(Value):
    """One save as the coordinator assigns it to a rank."""

    run: str
    attempt: Attempt
    rank: int
    world_size: int
    created_at: float


class StorageWriter(TorchStorageWriter):
    """A DCP storage writer with which `dcp.save` and `dcp.async_save` write checkpoints of a run.

    store: the URL of the store, or a Store. step: of the checkpoint; DCP's `checkpoint_id` replaces it for each save: a
    step, a path that ends in one ("outputs/step-1000"), or RUN@STEP. compress: "off", "fast" or "max". options: of the
    fsspec file system. daemon and token: the ckptd that decides commits if the store ignores If-None-Match; by default
    CKPTD_URL and CKPT_TOKEN.

    When dcp.save returns, the checkpoint is durable and committed, and its id is in the `storage_meta` of what dcp.save
    returns; if it raises, on any rank, nothing was committed (unless the store failed during the commit itself).
    Saving a step again commits another attempt of it and leaves the earlier one unchanged. After StorageReader has
    loaded a checkpoint of the run from the same store in this process, saves continue from it: newer checkpoints are
    abandoned.
    One writer does one save at a time, and can be pickled if it was given a URL.
    """

    def __init__(
        self,
        store: str | Store,
        run: str,
        step: int | None = None,
        *,
        compress: Literal["off", "fast", "max"] = "fast",
        options: Mapping[str, Any] | None = None,
        daemon: str | None = None,
        token: str | None = None,
    ) -> None:
        if compress not in POLICIES:
            raise InvalidRequest(f"compress {compress!r} is unknown", "Use 'off', 'fast' or 'max'")
        self._location = store
        self._options = options
        self._daemon = daemon or os.environ.get("CKPTD_URL")
        self._token = token or os.environ.get("CKPT_TOKEN")
        self._run = check_run(run)
        self._step = None if step is None else check_step(step)
        self._compress = compress
        self._is_coordinator = False
        self._plans: dict[int, SavePlan] = {}
        self._own: tuple[Assignment, Content] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Select the checkpoint of the next save. Raises InvalidName."""
        if checkpoint_id is not None:
            self._run, self._step = _new_checkpoint(checkpoint_id, self._run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `reset` accepts this id."""
        try:
            _new_checkpoint(checkpoint_id, "run")
        except BadInput:
            return False
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises InvalidRequest if the step is unknown, or without a coordinator that commits for all ranks."""
        if not kwargs.get("use_collectives", True):
            raise InvalidRequest("use_collectives=False saves without a coordinator", "Leave it out")
        if self._step is None:
            raise InvalidRequest("the step is not known", "Pass step= to StorageWriter, or checkpoint_id= to dcp.save")
        self._is_coordinator = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign one attempt to all ranks. Raises the store's errors."""
        assert self._step is not None
        now = system_clock()
        attempt = Attempt(self._step, new_ulid(now), generation=_generation(Run(self._open(), self._run)))
        self._plans = {rank: self._whole(rank, plan) for rank, plan in enumerate(plans)}
        return [
            replace(plan, storage_data=Assignment(self._run, attempt, rank, len(plans), now))
            for rank, plan in self._plans.items()
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard and, except on the coordinator, its receipt; durable on return.

        Raises UnsupportedObject for objects that cannot be stored without pickle, and the store's errors.
        """
        assignment: Assignment = plan.storage_data
        store = self._open()
        items = RankItems.of(plan, planner)
        shards = []
        if items.placed:
            name = names.shard_name(assignment.rank)
            encoded = encode_stream(items.chunks(), encode_by(POLICIES[self._compress]))
            key = RunKeys(assignment.run).shard(assignment.attempt, name)
            with closing(encoded):
                uploaded = upload_shard(store, key, raw_bytes(items.placed), encoded, lambda _: None)
            shards = [Shard(name=name, rank=assignment.rank, chunks=chunk_table(uploaded.chunks))]
        entries, slices = slice_tables(items.placed)
        content = Content(shards=shards, entries=entries, slices=slices, aliases={}, trees={})
        if self._is_coordinator:
            self._own = (assignment, content)
        else:
            _write_receipt(Run(store, assignment.run), assignment, content)
        future: Future[list[WriteResult]] = Future()
        future.set_result(items.results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; the checkpoint exists on return.

        Raises SaveFailed if a planned item has no result, ObjectMissing if a rank has no receipt, and the errors of
        `ckptstore.commits.commit.commit_attempt`.
        """
        assert self._own is not None
        (assignment, content), self._own = self._own, None
        self._check_complete(metadata, results)
        run = Run(self._open(), assignment.run)
        trees = nest(result.storage_data for rank in results for result in rank)
        own = _write_receipt(run, assignment, with_fields(content, trees=trees))
        others = [rank for rank in range(assignment.world_size) if rank != assignment.rank]
        receipts = read_receipts(run, assignment.attempt, others)
        commit_attempt(run, [*receipts[: assignment.rank], own, *receipts[assignment.rank :]])
        metadata.storage_meta = StorageMeta(checkpoint_id=names.checkpoint_id(assignment.run, assignment.attempt))

    def _whole(self, rank: int, plan: SavePlan) -> SavePlan:
        """The plan, or the rank's previous plan if a planner that caches plans marks it as unchanged."""
        if plan.usable:
            return plan
        if rank not in self._plans:
            raise InvalidRequest(
                "the planner cached the plan of a save that this StorageWriter did not do",
                "Use one StorageWriter for all saves, or enable_plan_caching=False",
            )
        # A rank that used the plan from its own cache would write into the attempt of the previous save.
        return self._plans[rank]

    def _check_complete(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        planned = [{item.index for item in plan.items} for plan in self._plans.values()]
        written = [{result.index for result in rank} for rank in results]
        names_written = {index.fqn for rank in written for index in rank}
        if planned != written or names_written != set(metadata.state_dict_metadata):
            missing = sorted(set(metadata.state_dict_metadata) - names_written)
            raise SaveFailed(
                f"not everything that was planned has been written ({', '.join(missing[:8]) or 'parts of tensors'})",
                "Nothing was committed. Check the planner, or save again",
            )

    def _open(self) -> Store:
        if not isinstance(self._location, str):
            return self._location
        store = RetryingStore(open_store(self._location, self._options, retried=True))
        return with_remote_create(store, self._daemon, self._token)


def _new_checkpoint(checkpoint_id: str | os.PathLike[str], run: str) -> tuple[str, int]:
    reference = parse_checkpoint_id(checkpoint_id, run)
    if reference.step is None or reference.ulid is not None:
        raise InvalidName(f"{checkpoint_id} cannot name a new checkpoint", "Use a step, or RUN@STEP")
    return reference.run, reference.step


def _write_receipt(run: Run, assignment: Assignment, content: Content) -> StoredReceipt:
    return write_receipt(
        run, assignment.attempt, content, assignment.created_at, assignment.rank, assignment.world_size
    )
