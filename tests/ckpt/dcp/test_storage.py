from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckpt import Checkpointer
from ckpt.dcp import StorageReader, StorageWriter
from ckptstore.commits.leases import active_leases
from ckptstore.errors import CorruptObject, InvalidName, InvalidRequest, StateMismatch, UnsupportedObject
from ckptstore.names import Reference, RunKeys, shard_name
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.ckpt.dcp_state import dcp, failing, load, same, save
from tests.ckpt.restoring.receiving import receiving
from tests.support.checkpoints import flip
from tests.support.stores import Faults, FaultyStore

MODES: tuple[Literal["before", "after"], ...] = ("before", "after")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def flip_a_bit(store: Store, checkpoint: str) -> None:
    found = StoreSource(store).find(Reference.parse(checkpoint))
    path = Path(store.object_url(RunKeys(found.run).shard(found.attempt, shard_name(0))).removeprefix("file://"))
    flip(path)


@pytest.mark.parametrize("place", [nullcontext, receiving], ids=["host", "device"])
def test_tensors_of_all_shapes_and_types_come_back_bit_exact(store: Store, place: Callable[[], Any]) -> None:
    torch.manual_seed(1)
    state = {
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3, dtype=torch.float16), "large": torch.randn(300, 1000),
        "turned": torch.randn(20, 30).T, "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "eight": torch.randn(9).to(torch.float8_e4m3fn), "flags": torch.tensor([True, False]),
        "nan": torch.tensor([math.nan, -0.0]),
    }  # fmt: skip
    save(store, state)
    with place():
        loaded = load(store, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        both = [each.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (loaded[name], tensor)]
        assert torch.equal(*both), name


def test_destinations_keep_their_memory_type_and_layout(store: Store) -> None:
    save(store, {"x": torch.arange(6.0).reshape(2, 3)})
    memory = torch.zeros(3, 2, dtype=torch.float64)
    load(store, {"x": memory.T})
    assert memory.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_objects_of_all_sorts_come_back(store: Store) -> None:
    state: dict[str, dict[str, Any]] = {
        "objects": {
            "none": None, "float": math.inf, "bytes": b"\x00", "tuple": (1, (2.5, "x")), "set": {1, 2},
            "size": torch.Size([2]), "dtype": torch.bfloat16, "number": np.float32(1.5), "large": 1 << 80,
            "array": np.arange(30000.0), "backwards": np.arange(3)[::-1], "list": [1, [2, "y"]], "empty": [],
            "state": ("MT19937", np.arange(624, dtype=np.uint32), torch.arange(3)),
            "mixed": [{"a": 1}, {"b": [torch.ones(2), 5]}, {"$odd": 2}],
        }
    }  # fmt: skip
    save(store, state)
    loaded = _load_state_dict_from_keys(storage_reader=StorageReader(store, run="r"))["objects"]
    assert loaded.keys() == state["objects"].keys()
    for name in loaded.keys() - {"array", "backwards", "state", "mixed"}:
        assert loaded[name] == state["objects"][name]
        assert type(loaded[name]) is type(state["objects"][name])
    for name in ("array", "backwards"):
        assert np.array_equal(loaded[name], state["objects"][name])
    kind, words, tail = loaded["state"]
    assert (kind, words.dtype, words.sum(), tail.tolist()) == ("MT19937", np.uint32, 624 * 623 // 2, [0, 1, 2])
    assert [loaded["mixed"][0], loaded["mixed"][1]["b"][0].tolist(), loaded["mixed"][1]["b"][1]] == [
        {"a": 1}, [1, 1], 5,
    ]  # fmt: skip
    assert loaded["mixed"][2] == {"$odd": 2}


class Unknown:
    """No type that can be stored."""


def test_an_object_that_needs_pickle_is_refused_by_name(store: Store) -> None:
    with failing(UnsupportedObject, "state at 'extra/deep/1' is a .*Unknown"):
        save(store, {"extra": {"deep": [1, Unknown()]}})
    with failing(UnsupportedObject, r"tensor at 'x' .*sparse"):
        save(store, {"x": torch.eye(3).to_sparse()})
    assert StoreSource(store).checkpoints("r") == []


def test_names_that_would_be_one_are_refused(store: Store) -> None:
    with failing(UnsupportedObject, "two tensors of the state have the name 'a/b'"):
        save(store, {"a/b": torch.zeros(3), "a": {"b": torch.ones(3)}})
    with failing(UnsupportedObject, "two tensors of the state have the name 'a/0/1'"):
        save(store, {"a": ({1: torch.zeros(3), "1": torch.ones(3)},)})


def test_a_dict_that_resembles_an_optimizer_keeps_its_names(store: Store) -> None:
    state = {"x": {"state": {"other": 1}, "groups": [{"params": ["a"], "lr": 1}]}}
    save(store, state)
    assert load(store, {"x": {"state": {"other": 0}, "groups": [{"params": [], "lr": 0}]}}) == state


class OwnBytes(DefaultSavePlanner):
    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, [object] if isinstance(object, int) else object)


def test_bytes_that_a_planner_made_are_read_without_pickle(store: Store) -> None:
    save(store, {"number": 5}, planner=OwnBytes())
    assert load(store, {"number": 0}) == {"number": [5]}
    with failing(UnsupportedObject, "state at 'unknown' is serialized by OwnBytes in a form that needs pickle"):
        save(store, {"unknown": Unknown()}, planner=OwnBytes())


def test_planners_that_do_not_flatten(store: Store) -> None:
    flat = {"flatten_state_dict": False}
    save(store, {"a.b": torch.ones(2), "n": [1, 2]}, planner=DefaultSavePlanner(**flat))
    state = {"a.b": torch.zeros(2), "n": None}
    load(store, state, planner=DefaultLoadPlanner(**flat, flatten_sharded_tensors=False))
    assert same(state, {"a.b": torch.ones(2), "n": [1, 2]})
    with failing(UnsupportedObject, "state at 'options' is a dict or list that the planner did not flatten"):
        save(store, {"options": {"lr": 1}}, planner=DefaultSavePlanner(**flat))


def test_saving_a_step_again_leaves_the_earlier_one(store: Store) -> None:
    first = save(store, {"x": torch.ones(3)})
    before = {info.key: store.get(info.key) for info in store.list("")}
    second = save(store, {"x": torch.zeros(3)})
    assert before.items() <= {info.key: store.get(info.key) for info in store.list("")}.items()
    assert load(store, {"x": torch.empty(3)}, first)["x"].tolist() == [1, 1, 1]
    for checkpoint in (second, 1, None):
        assert load(store, {"x": torch.empty(3)}, checkpoint)["x"].tolist() == [0, 0, 0]


def test_a_flipped_bit_is_not_loaded(store: Store) -> None:
    checkpoint = save(store, {"x": torch.randn(1000)})
    flip_a_bit(store, checkpoint)
    state = {"x": torch.zeros(1000)}
    with failing(CorruptObject, "does not match its checksum"):
        load(store, state)
    assert not state["x"].any()


def test_any_single_fault_of_the_store_fails_the_save_or_changes_nothing(tmp_path: Path) -> None:
    state = {"x": torch.ones(3), "n": 1}
    store, faults = open_store(str(tmp_path / "counted")), Faults()
    save(FaultyStore(store, faults), state)
    assert len(faults.calls) > 5
    for number in range(len(faults.calls)):
        for mode in MODES:
            store = open_store(str(tmp_path / f"{number}-{mode}"))
            faulty = FaultyStore(store, Faults(fail_at=number, mode=mode))
            try:
                save(faulty, state)
            except CheckpointException:
                assert StoreSource(store).checkpoints("r") == [], (number, mode)
            else:
                assert same(load(store, {"x": torch.zeros(3), "n": 0}), state)


class Watching(DefaultLoadPlanner):
    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store, self.held = store, 0

    def commit_tensor(self, read_item: Any, tensor: Any) -> None:
        self.held += len(active_leases(Run(self.store, "r")))


def test_a_lease_is_held_while_reading(store: Store) -> None:
    save(store, {"x": torch.ones(3)})
    planner = Watching(store)
    load(store, {"x": torch.zeros(3)}, planner=planner)
    assert planner.held == 1
    assert not active_leases(Run(store, "r"))


def test_only_what_is_needed_is_read_and_only_once(store: Store) -> None:
    state = {f"large{i}": torch.randn(1 << 18) for i in range(4)} | {f"small{i}": torch.randn(10) for i in range(4)}
    save(store, state)
    for names in (["small0", "small1", "small2"], ["large2"]):
        faults = Faults()
        reader = StorageReader(FaultyStore(store, faults), run="r")
        dcp.load({name: torch.zeros_like(state[name]) for name in names}, storage_reader=reader)
        assert len([call for call in faults.calls if call.startswith("read_into")]) == 1


@pytest.mark.parametrize(
    ("checkpoint_id", "found"),
    [
        ("12", "r@12"), ("out/step-12", "r@12"), (Path("out/step_12/"), "r@12"), ("step12", "r@12"),
        ("other@12", "other@12"),
    ],
)  # fmt: skip
def test_checkpoint_ids(store: Store, checkpoint_id: Any, found: str) -> None:
    writer, reader = StorageWriter(store, run="r", step=1), StorageReader(store, run="r")
    for each in (writer, reader):
        assert each.validate_checkpoint_id(checkpoint_id)
    metadata = dcp.save({"x": torch.ones(3)}, storage_writer=writer, checkpoint_id=checkpoint_id)
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.checkpoint_id).startswith(f"{found}.")
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=reader, checkpoint_id=checkpoint_id)
    assert state["x"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("checkpoint_id", ["", "latest", "model-v2", "../run@1", "run@latest", f"run@1.{'0' * 26}"])
def test_checkpoint_ids_that_name_no_new_checkpoint(store: Store, checkpoint_id: str) -> None:
    assert not StorageWriter.validate_checkpoint_id(checkpoint_id)
    assert StorageReader.validate_checkpoint_id(checkpoint_id) == checkpoint_id.startswith("run@")
    with pytest.raises(InvalidName):
        dcp.save({}, storage_writer=StorageWriter(store, run="r", step=1), checkpoint_id=checkpoint_id)


def test_wrong_use_is_named(store: Store) -> None:
    with failing(InvalidRequest, "the step is not known"):
        dcp.save({}, storage_writer=StorageWriter(store, run="r"))
    with pytest.raises(InvalidRequest, match="use_collectives"):
        save(store, {}, use_collectives=False)
    with pytest.raises(InvalidRequest, match="compress"):
        StorageWriter(store, run="r", compress="zip")  # type: ignore[arg-type]
    with pytest.raises(CheckpointException, match="no checkpoint"):
        load(store, {"x": torch.zeros(3)})


def test_a_rank_that_planned_on_another_checkpoint_fails_if_it_does_not_fit(store: Store) -> None:
    first = save(store, {"x": torch.ones(3)}, step=1)
    save(store, {"x": torch.ones(4)}, step=2)
    reader, planner = StorageReader(store, run="r"), DefaultLoadPlanner()
    planner.set_up_planner({"x": torch.zeros(4)}, reader.read_metadata(), is_coordinator=False)
    plan = planner.create_local_plan()
    plan.storage_data = first
    with pytest.raises(StateMismatch, match="differ in 'x'"):
        reader.read_data(plan, planner)


def test_tied_tensors_are_one_entry_and_fill_both_names(store: Store, tmp_path: Path) -> None:
    embed, head = nn.Linear(3, 5, bias=False), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "head": head})
    with Checkpointer(str(tmp_path / "store"), run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1)
    state = load(
        str(tmp_path / "store"), {"model": {"embed.weight": torch.zeros(5, 3), "head.weight": torch.zeros(5, 3)}}
    )
    assert torch.equal(state["model"]["embed.weight"], embed.weight)
    assert torch.equal(state["model"]["head.weight"], embed.weight)
