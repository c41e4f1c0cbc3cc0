"""What ckpt.dcp uses of torch.distributed.checkpoint. A failure here says what a new torch has changed."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
from torch.distributed.checkpoint import metadata, planner, storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from ckpt.dcp import StorageReader, StorageWriter

SHARED = {"reset": ["self", "checkpoint_id"], "validate_checkpoint_id": ["checkpoint_id"]}
WRITER = {
    **SHARED,
    "set_up_storage_writer": ["self", "is_coordinator", "args", "kwargs"],
    "prepare_local_plan": ["self", "plan"],
    "prepare_global_plan": ["self", "plans"],
    "write_data": ["self", "plan", "planner"],
    "finish": ["self", "metadata", "results"],
}
READER = {
    **SHARED,
    "read_metadata": ["self", "args", "kwargs"],
    "set_up_storage_reader": ["self", "metadata", "is_coordinator", "args", "kwargs"],
    "prepare_local_plan": ["self", "plan"],
    "prepare_global_plan": ["self", "plans"],
    "read_data": ["self", "plan", "planner"],
}
SAVE_PLANNER = {"resolve_data": ["self", "write_item"], "lookup_object": ["self", "index"]}
LOAD_PLANNER = {
    "resolve_tensor": ["self", "read_item"],
    "commit_tensor": ["self", "read_item", "tensor"],
    "load_bytes": ["self", "read_item", "value"],
}


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (storage.StorageWriter, WRITER),
        (storage.StorageReader, READER),
        (DefaultSavePlanner, SAVE_PLANNER),
        (DefaultLoadPlanner, LOAD_PLANNER),
    ],
)
def test_methods_that_torch_or_ckpt_calls(kind: Any, expected: dict[str, list[str]]) -> None:
    assert "Planner" in kind.__name__ or set(kind.__abstractmethods__) == expected.keys()
    assert {name: parameters(getattr(kind, name)) for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (planner.WriteItem, ["index", "type", "bytes_io_data", "tensor_data"]),
        (planner.TensorWriteData, ["chunk", "properties", "size"]),
        (planner.ReadItem, ["type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"]),
        (planner.SavePlan, ["items", "storage_data", "planner_data", "usable"]),
        (planner.LoadPlan, ["items", "storage_data", "planner_data"]),
        (storage.WriteResult, ["index", "size_in_bytes", "storage_data"]),
        (metadata.MetadataIndex, ["fqn", "offset", "index"]),
        (metadata.ChunkStorageMetadata, ["offsets", "sizes"]),
        (metadata.TensorStorageMetadata, ["properties", "size", "chunks"]),
        (metadata.BytesStorageMetadata, []),
        (metadata.Metadata, ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]),
    ],
)
def test_fields(kind: Any, expected: list[str]) -> None:
    assert [field.name for field in fields(kind)] == expected


def test_kinds_of_items() -> None:
    assert [kind.name for kind in planner.WriteItemType] == ["TENSOR", "SHARD", "BYTE_IO"]
    assert [kind.name for kind in planner.LoadItemType] == ["TENSOR", "BYTE_IO"]


def test_what_dcp_looks_for_in_signatures() -> None:
    """It passes use_collectives only to a parameter named kwargs, and asks a reader with one twice."""
    assert '"kwargs"' in inspect.getsource(_save_state_dict)
    assert "kwargs" in parameters(StorageWriter.set_up_storage_writer)
    assert "inspect.signature(storage_reader.read_metadata)" in inspect.getsource(_load_state_dict)
    assert "kwargs" not in parameters(StorageReader.read_metadata)


def test_a_flattening_planner_gives_the_paths_along() -> None:
    saving = DefaultSavePlanner()
    saving.set_up_planner({"a": {"b.c": 1, "d": [{"e": 2}]}})
    plan = saving.create_local_plan()
    assert plan.planner_data == {"a.b.c": ("a", "b.c"), "a.d.0.e": ("a", "d", 0, "e")}
    assert [item.index.fqn for item in plan.items] == list(plan.planner_data)
