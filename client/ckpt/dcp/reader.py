"""StorageReader: turns the load plans of DCP into one plan of chunk reads.

The metadata declares each tensor as one chunk. The read planner of ckptstore finds the slices and reads only the chunks
that are needed, whatever the layout of the save. So DCP's plan is small, and valid for any checkpoint with the same
tensors.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from ckpt.dcp.naming import Value, flatten, parse_checkpoint_id
from ckpt.dcp.writer import continue_from
from ckpt.dtypes import BY_NAME
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.resolve import leased, noting_damage
from ckptapi.opening import open_source
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import BadInput, CorruptObject, StateMismatch, UnsupportedFormat, UnsupportedObject
from ckptstore.format.documents import Content
from ckptstore.names import Reference, check_run, check_step
from ckptstore.reading.source import Source, StoreSource, read_manifest
from ckptstore.stores import Store
from ckptstore.stores.retrying import RETRY_S


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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Select the checkpoint of the next load. Raises InvalidName."""
        if checkpoint_id is not None:
            self._reference = parse_checkpoint_id(checkpoint_id, self._reference.run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
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
            continue_from(source.url, opened.checkpoint)
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
        tensors = {name: (dtype, torch.Size(shape)) for name, dtype, shape in self.content.entries.rows()}
        described: dict[str, STORAGE_TYPES] = {}
        for fqn, value in self.values.items():
            described[fqn] = BytesStorageMetadata()
            if value.entry is not None:
                if value.entry not in tensors:
                    raise CorruptObject(f"a tree names the entry {value.entry!r}, which the manifest does not have")
                described[fqn] = _describe(value.entry, *tensors[value.entry])
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


def _describe(entry: str, dtype: str, size: torch.Size) -> TensorStorageMetadata:
    if dtype not in BY_NAME:
        raise UnsupportedFormat(
            f"entry {entry!r} has type {dtype}, which this version of torch does not support", "Upgrade torch"
        )
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=BY_NAME[dtype]), size, [whole])
