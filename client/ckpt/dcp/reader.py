"""DCP's way in: what its planners ask for becomes one plan of chunk reads, checked and placed.

DCP is told that every tensor is stored in one piece. Which slices it lies in is our planner's business: it reads
only the chunks that are needed, however the checkpoint was saved, and DCP's plan is small and holds for any
checkpoint with the same tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckpt.dcp.loading import Loading
from ckpt.dcp.naming import Value, flatten, parse_checkpoint_id
from ckpt.dtypes import BY_NAME
from ckpt.restoring.resolve import take_lease
from ckptapi.opening import open_source
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import BadInput, CorruptObject, StateMismatch, UnsupportedFormat, UnsupportedObject
from ckptstore.format.documents import Content
from ckptstore.format.planning import plan_reads
from ckptstore.names import Reference, check_run, check_step
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import Source, StoreSource, read_manifest
from ckptstore.stores import Store


class StorageReader(TorchStorageReader):
    """Lets `dcp.load` read a checkpoint of a run.

    store: its URL, that of a daemon, or a Store. checkpoint: a step or an id; by default the newest when the load
    begins, which the coordinator decides for all ranks. DCP's `checkpoint_id` sets it anew. token: for a daemon.
    options: of the fsspec file system.

    Every chunk is checked before a byte of it is placed. A rank fetches each chunk that it needs once, however many
    items need it; replicas each fetch what they need, so that many of them should read through a daemon, which reads
    the store once. If dcp.load raises, the state dict holds a mixture and must not be used.
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
        self._opened: _Opened | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """The next load is of this checkpoint. Raises InvalidName."""
        if checkpoint_id is not None:
            self._reference = parse_checkpoint_id(checkpoint_id, self._reference.run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `reset` would take it."""
        try:
            parse_checkpoint_id(checkpoint_id, "run")
        except BadInput:
            return False
        return True

    # Not named kwargs: DCP would take that for an offer to be asked again, by rank, after a failure, and
    # this rank would leave the collectives of the others.
    def read_metadata(self, *args: Any, **ignored: Any) -> Metadata:
        """What the checkpoint holds.

        Raises NoCheckpoint, Damaged, ObjectMissing, Unavailable or UnsupportedObject; dcp.load makes of any of them
        an AssertionError that quotes it.
        """
        with self._connect() as source:
            self._opened = _Opened.of(source, source.find(self._reference))
        return self._opened.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks read the coordinator's checkpoint, even if others have found a newer one meanwhile."""
        assert self._opened is not None
        return [replace(plan, storage_data=self._opened.checkpoint.id) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch, check and place everything, under a lease.

        Raises CorruptObject before a damaged chunk is placed, StateMismatch if the coordinator's checkpoint does not
        hold what was planned, NoCheckpoint if it is being deleted, ObjectMissing or Unavailable.
        """
        with self._connect() as source:
            opened = self._agreed(source, plan)
            with _leased(source, opened.checkpoint):
                loading = Loading(opened.content)
                for item in plan.items:
                    value = opened.values[item.storage_index.fqn]
                    if item.type is LoadItemType.BYTE_IO:
                        loading.add_object(planner, item, value)
                    else:
                        loading.add_tensor(planner, item, value)
                fetch(source, opened.checkpoint, plan_reads(opened.content, loading.wants), loading.buffers)
                loading.place()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _connect(self) -> closing[Source]:
        store = self._store
        return closing(open_source(store, self._token, self._options) if isinstance(store, str) else StoreSource(store))

    def _agreed(self, source: Source, plan: LoadPlan) -> _Opened:
        """The coordinator's checkpoint, which this rank may not have planned on."""
        planned = self._opened
        assert planned is not None
        if plan.storage_data == planned.checkpoint.id:
            return planned
        opened = _Opened.of(source, source.find(Reference.parse(plan.storage_data)))
        for fqn in {item.storage_index.fqn for item in plan.items}:
            ours, theirs = (found.metadata.state_dict_metadata.get(fqn) for found in (planned, opened))
            if ours != theirs:
                raise StateMismatch(
                    f"ranks found {planned.checkpoint.id} or {opened.checkpoint.id}, which differ in {fqn!r}",
                    "Load again, or name the checkpoint",
                )
        return opened


@dataclass(frozen=True)
class _Opened:
    """A checkpoint whose manifest has been read."""

    checkpoint: Checkpoint
    content: Content
    values: dict[str, Value]
    """By FQN."""

    @staticmethod
    def of(source: Source, checkpoint: Checkpoint) -> _Opened:
        content = read_manifest(source, checkpoint).content
        values: dict[str, Value] = {}
        for value in flatten(content.trees):
            if value.fqn in values:
                found = f"{values[value.fqn].name!r} and {value.name!r}"
                raise UnsupportedObject(
                    f"{checkpoint.id} holds {found}, and DCP calls both {value.fqn!r}", "Restore it with ckpt.restore"
                )
            values[value.fqn] = value
        return _Opened(checkpoint, content, values)

    @cached_property
    def metadata(self) -> Metadata:
        """What DCP plans with."""
        entries = self.content.entries
        columns = zip(entries.name, entries.dtype, entries.shape, strict=True)
        tensors = {name: (dtype, torch.Size(shape)) for name, dtype, shape in columns}
        described: dict[str, STORAGE_TYPES] = {}
        for fqn, value in self.values.items():
            described[fqn] = BytesStorageMetadata()
            if value.entry is not None:
                if value.entry not in tensors:
                    raise CorruptObject(f"a tree names the entry {value.entry!r}, which the manifest does not have")
                described[fqn] = _describe(value.entry, *tensors[value.entry])
        return Metadata(described, planner_data={fqn: value.path for fqn, value in self.values.items()})


@contextmanager
def _leased(source: Source, checkpoint: Checkpoint) -> Iterator[None]:
    lease = take_lease(source, checkpoint)
    try:
        yield
    finally:
        if lease is not None:
            source.release_lease(checkpoint.run, lease)


def _describe(entry: str, dtype: str, size: torch.Size) -> TensorStorageMetadata:
    if dtype not in BY_NAME:
        raise UnsupportedFormat(f"entry {entry!r} has type {dtype}, which this torch does not know", "Upgrade torch")
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=BY_NAME[dtype]), size, [whole])
