"""StorageWriter and StorageReader: DCP's plans of a save and of a load, carried out on a ckpt store.

    all ranks     write_data   encode and upload a shard, then write the receipt
    coordinator   finish       check all results, write its own receipt with the trees of all ranks, then commit

The coordinator's receipt is written last on purpose: an attempt without it is incomplete, so that no other process (a
daemon, the next trainer) commits a save that DCP has reported as failed.

A load turns the plans of DCP into one plan of chunk reads. The metadata declares each tensor as one chunk. The read
planner of ckptstore finds the slices and reads only the chunks that are needed, whatever the layout of the save. So
DCP's plan is small, and valid for any checkpoint with the same tensors.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec.structs import replace as with_fields
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt.capture.parts import has_plain_elements
from ckpt.capture.tensors import name_of, on_host, small_leaf, tensor_bytes
from ckpt.dcp.naming import CheckpointId, Path, Value, entry_name, flatten, is_value, nest, parse_checkpoint_id
from ckpt.dtypes import NAMES
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.resolve import leased, noting_damage
from ckpt.saver.encode import encode_by, encode_stream
from ckpt.saver.pipeline import upload_shard
from ckptapi.opening import open_source
from ckptapi.remote_create import with_remote_create
from ckptstore import names, values
from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import POLICIES
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.commit import commit_attempt, read_receipts, write_receipt
from ckptstore.commits.generations import Session, begin_generation, newest_generation
from ckptstore.errors import BadInput, InvalidName, InvalidRequest, SaveFailed, StateMismatch, UnsupportedObject
from ckptstore.format.documents import JSON, Content, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.shards import (
    ChunkSpan,
    Placed,
    Slice,
    chunk_table,
    place_slices,
    plan_chunks,
    raw_bytes,
    slice_tables,
)
from ckptstore.format.trees import TAG, encode_tree, unsupported
from ckptstore.names import Attempt, Reference, check_run, check_step, new_ulid
from ckptstore.reading.source import Source, StoreSource, read_manifest
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.stores.retrying import RETRY_S, RetryingStore

_Tensors = dict[Slice, Callable[[], torch.Tensor]]


class RankItems(NamedTuple):
    """The items of one rank. Tensors are resolved one after the other, when their bytes are needed."""

    placed: list[Placed]
    results: list[WriteResult]
    """One result per item, with its Value."""
    tensors: _Tensors

    @staticmethod
    def of(plan: SavePlan, planner: SavePlanner) -> RankItems:
        """The items of a plan. Raises UnsupportedObject for objects that cannot be stored without pickle."""
        tensors: _Tensors = {}
        results = []
        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        for item in plan.items:
            path = tuple(paths.get(item.index.fqn) or (item.index.fqn,))  # planners that do not flatten have no paths
            if item.type is WriteItemType.BYTE_IO:
                value = _object(path, _lookup(planner, item, path), tensors)
                size = len(msgspec.json.encode(value.tree))
            else:
                piece = _slice(item, path)
                value, size = Value(path, {TAG: "tensor", "name": piece.entry}), piece.bytes
                # An empty part of a larger tensor is not stored.
                if piece.bytes or 0 in piece.shape:
                    _add(tensors, piece, partial(_tensor, planner, item, piece))
            results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=value))
        return RankItems(place_slices(tensors), results, tensors)

    def chunks(self) -> Iterator[tuple[memoryview, ChunkSpan]]:
        """The raw bytes of each chunk, in order. Holds at most one tensor and one chunk in addition to those in use."""
        stream = (tensor_bytes(self.tensors[place.slice]()) for place in self.placed if place.slice.bytes)
        left = memoryview(b"")
        for span in plan_chunks(self.placed):
            parts, missing = [], span.bytes
            while missing:
                left = left or next(stream)
                parts.append(left[:missing])
                left, missing = left[missing:], missing - len(parts[-1])
            raw = parts[0] if len(parts) == 1 else memoryview(b"".join(parts))
            yield raw, span


def _add(tensors: _Tensors, piece: Slice, resolve: Callable[[], torch.Tensor]) -> None:
    if piece in tensors:
        raise UnsupportedObject(
            f"two tensors of the state have the name {piece.entry!r}",
            'Rename a key: a "/" in it reads like a nested dict, and 1 like "1"',
        )
    tensors[piece] = resolve


def _slice(item: WriteItem, path: Path) -> Slice:
    data = item.tensor_data
    assert data is not None
    name = entry_name(path)
    return Slice(name, name_of(name, data.properties.dtype), tuple(data.size), (*data.chunk.offsets, *data.chunk.sizes))


def _tensor(planner: SavePlanner, item: WriteItem, piece: Slice) -> torch.Tensor:
    """The planned part of a tensor, in host memory. Raises UnsupportedObject if it is not what was planned."""
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    sizes = piece.box[len(piece.shape) :]
    if not has_plain_elements(tensor) or tuple(tensor.shape) != sizes or NAMES.get(tensor.dtype) != piece.dtype:
        raise UnsupportedObject(
            f"tensor at {piece.entry!r} is {tensor.dtype} {list(tensor.shape)} ({tensor.layout}, {tensor.device}), "
            f"planned as {piece.dtype} {list(sizes)}",
            "Store dense tensors; a planner that transforms tensors must plan with the transformed ones",
        )
    return on_host(tensor)


def _object(path: Path, value: Any, tensors: _Tensors) -> Value:
    """The object's tree; tensors and arrays in it become separate entries."""

    def leaf(at: str, found: Any) -> JSON:
        if type(found) in (torch.Tensor, torch.nn.Parameter) and has_plain_elements(found):
            kind, tensor = "tensor", found
        elif type(found) is np.ndarray:
            kind, tensor = "array", _from_array(at, found)
        else:
            return small_leaf(at, found)
        _add(tensors, Slice.whole(at, name_of(at, tensor.dtype), tuple(tensor.shape)), partial(on_host, tensor))
        return {TAG: kind, "name": at}

    name = entry_name(path)
    tree = encode_tree(value, name, leaf)
    if not is_value(tree):
        raise UnsupportedObject(
            f"state at {name!r} is a dict or list that the planner did not flatten",
            "Use a planner with flatten_state_dict=True, the default",
        )
    return Value(path, tree)


def _from_array(path: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as error:
        raise unsupported(path, array) from error


def _lookup(planner: SavePlanner, item: WriteItem, path: Path) -> Any:
    """The object itself. If the planner serializes objects itself: the object loaded from its bytes without pickle."""
    kind = type(planner)
    if (
        isinstance(planner, DefaultSavePlanner)
        and kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object  # type: ignore[attr-defined]
    ):
        return planner.lookup_object(item.index)
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:
        raise UnsupportedObject(
            f"state at {entry_name(path)!r} is serialized by {kind.__qualname__} in a form that needs pickle: {error}",
            "Change the planner to return numbers, strings, lists, dicts or tensors",
        ) from error


_sessions: dict[tuple[str, str], Session] = {}
"""By URL of the store and run: begun by the last load of this process, from whose checkpoint saves continue."""


class Assignment(values.Value):
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

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Select the checkpoint of the next save. Raises InvalidName."""
        if checkpoint_id is not None:
            self._run, self._step = _new_checkpoint(checkpoint_id, self._run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
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
        now, run = system_clock(), Run(self._open(), self._run)
        session = _sessions.get((run.store.url, run.name))
        generation = newest_generation(run) if session is None else begin_generation(run, session).number
        attempt = Attempt(self._step, new_ulid(now), generation=generation)
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
        run = Run(self._open(), assignment.run)
        items = RankItems.of(plan, planner)
        shards = []
        if items.placed:
            name = names.shard_name(assignment.rank)
            key = run.keys.shard(assignment.attempt, name)
            with closing(encode_stream(items.chunks(), encode_by(POLICIES[self._compress]))) as encoded:
                uploaded = upload_shard(run.store, key, raw_bytes(items.placed), encoded, lambda _: None)
            shards = [Shard(name=name, rank=assignment.rank, chunks=chunk_table(uploaded.chunks))]
        entries, slices = slice_tables(items.placed)
        content = Content(shards=shards, entries=entries, slices=slices, aliases={}, trees={})
        if self._is_coordinator:
            self._own = (assignment, content)
        else:
            _write_receipt(run, assignment, content)
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


def _new_checkpoint(checkpoint_id: CheckpointId, run: str) -> tuple[str, int]:
    reference = parse_checkpoint_id(checkpoint_id, run)
    if reference.step is None or reference.ulid is not None:
        raise InvalidName(f"{checkpoint_id} cannot name a new checkpoint", "Use a step, or RUN@STEP")
    return reference.run, reference.step


def _write_receipt(run: Run, assignment: Assignment, content: Content) -> StoredReceipt:
    return write_receipt(
        run, assignment.attempt, content, assignment.created_at, assignment.rank, assignment.world_size
    )


class StorageReader(TorchStorageReader):
    """A DCP storage reader with which `dcp.load` reads a checkpoint of a run.

    store: the URL of the store or of a daemon, or a Store. checkpoint: a step or an id; by default the newest when the
    load begins, which the coordinator chooses for all ranks. DCP's `checkpoint_id` replaces it. token: for a daemon.
    options: of the fsspec file system.

    Every chunk is verified before a byte of it is placed. A rank fetches each chunk that it needs once, however many
    items need it. Each replica fetches its own chunks, so many replicas should read through a daemon, which reads the
    store once. If dcp.load raises, the state dict holds a mixture and must not be used.
    """

    def __init__(
        self,
        store: str | Store,
        run: str,
        checkpoint: str | int | None = None,
        *,
        token: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._token = token
        self._options = options
        self._reference = Reference(check_run(run), None)
        if isinstance(checkpoint, int):
            self._reference = Reference(run, check_step(checkpoint))
        elif checkpoint is not None:
            self.reset(checkpoint)
        self._opened: _OpenCheckpoint | None = None

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Select the checkpoint of the next load. Raises InvalidName."""
        if checkpoint_id is not None:
            self._reference = parse_checkpoint_id(checkpoint_id, self._reference.run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether `reset` accepts this id."""
        try:
            parse_checkpoint_id(checkpoint_id, "run")
        except BadInput:
            return False
        return True

    # Not named kwargs: DCP would take that as support for per-rank metadata and call again with the rank after a
    # failure, and this rank would leave the collectives of the others.
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """The metadata of the checkpoint.

        Raises NoCheckpoint, Damaged, ObjectMissing, Unavailable or UnsupportedObject; dcp.load turns each of them into
        an AssertionError that quotes it.
        """
        with self._connect() as source:
            checkpoint = source.find(self._reference)
            with noting_damage(source, checkpoint):
                self._opened = _OpenCheckpoint.of(source, checkpoint)
        return self._opened.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing; DCP requires the method."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Make all ranks read the coordinator's checkpoint, even if others have found a newer one."""
        assert self._opened is not None
        return [replace(plan, storage_data=self._opened.checkpoint.id) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, verify and place everything, under a lease.

        Raises CorruptObject before a damaged chunk is placed, StateMismatch if the coordinator's checkpoint does not
        hold what was planned, NoCheckpoint if it is being deleted, ObjectMissing or Unavailable.
        """
        with self._connect() as source:
            opened = self._agreed(source, plan)
            with leased(source, opened.checkpoint), noting_damage(source, opened.checkpoint):
                destinations = Destinations(opened.content)
                finish = [_plan_item(destinations, planner, opened.values, item) for item in plan.items]
                destinations.read(source, opened.checkpoint)
                for step in finish:
                    step()
            found = opened.checkpoint  # saves of its run continue from it, in a new generation
            _sessions[source.url, found.run] = Session(new_ulid(system_clock()), found.attempt)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _connect(self) -> closing[Source]:
        store = self._store
        if not isinstance(store, str):
            return closing(StoreSource(store))
        return closing(open_source(store, self._token, self._options, patience_s=RETRY_S))

    def _agreed(self, source: Source, plan: LoadPlan) -> _OpenCheckpoint:
        """The coordinator's checkpoint, even if this rank has planned with another one."""
        planned = self._opened
        assert planned is not None
        if plan.storage_data == planned.checkpoint.id:
            return planned
        opened = _OpenCheckpoint.of(source, source.find(Reference.parse(plan.storage_data)))
        for fqn in {item.storage_index.fqn for item in plan.items}:
            ours, theirs = (found.metadata.state_dict_metadata.get(fqn) for found in (planned, opened))
            if ours != theirs:
                raise StateMismatch(
                    f"ranks found {planned.checkpoint.id} or {opened.checkpoint.id}, which differ in {fqn!r}",
                    "Load again, or pass checkpoint=",
                )
        return opened


@dataclass(frozen=True)
class _OpenCheckpoint:
    """A checkpoint whose manifest has been read."""

    checkpoint: Checkpoint
    content: Content
    values: dict[str, Value]
    """The values by FQN."""

    @staticmethod
    def of(source: Source, checkpoint: Checkpoint) -> _OpenCheckpoint:
        content = read_manifest(source, checkpoint).content
        values: dict[str, Value] = {}
        for value in flatten(content.trees):
            if value.fqn in values:
                found = f"{values[value.fqn].name!r} and {value.name!r}"
                raise UnsupportedObject(
                    f"{checkpoint.id} holds {found}, and DCP calls both {value.fqn!r}", "Restore it with ckpt.restore"
                )
            values[value.fqn] = value
        return _OpenCheckpoint(checkpoint, content, values)

    @cached_property
    def metadata(self) -> Metadata:
        """The metadata from which DCP makes its load plan."""
        destinations, described = Destinations(self.content), dict[str, STORAGE_TYPES]()
        for fqn, value in self.values.items():
            entry = value.entry
            described[fqn] = BytesStorageMetadata() if entry is None else _metadata(*destinations.describe(entry))
        return Metadata(described, planner_data={fqn: value.path for fqn, value in self.values.items()})


def _plan_item(
    destinations: Destinations, planner: LoadPlanner, values: Mapping[str, Value], item: ReadItem
) -> Callable[[], object]:
    """Register what an item needs; the result passes it to the planner, once the bytes are in place."""
    value = values[item.storage_index.fqn]
    if item.type is LoadItemType.BYTE_IO:
        return partial(_load_object, planner, item, destinations.decode(value.tree, value.name, torch.device("cpu")))
    assert value.entry is not None
    target = planner.resolve_tensor(item).detach()
    # The metadata declares each entry as one chunk, so offsets in storage are offsets in the entry.
    destinations.fill_box(value.entry, (*item.storage_offsets, *item.lengths), target)
    return partial(planner.commit_tensor, item, target)


def _load_object(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    # Planners unpickle these bytes. They are made here: bytes from the store are never unpickled.
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    planner.load_bytes(item, data)


def _metadata(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorStorageMetadata:
    size = torch.Size(shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [whole])
