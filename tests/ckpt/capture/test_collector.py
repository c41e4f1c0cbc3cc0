"""State that all ranks hold alike: kept once, by name, in any export; and a restore without objects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ckpt import Checkpointer
from ckpt.data import resumable
from ckptstore.errors import InvalidRequest, UnsupportedObject
from tests.ckpt.loops import open_run
from tests.support.command_line import invoke, succeed
from tests.support.parallel.runner import Scenario, run_scenario, run_scenarios
from tests.support.parallel.zero import ZeroRedundancyOptimizer
from tests.support.waiting import present


class Moments(NamedTuple):
    mean: torch.Tensor
    number: int


@dataclass
class Progress:
    moments: Moments
    began: datetime
    folder: Path
    _hidden: int = 3


@dataclass(frozen=True, slots=True)
class Window:
    size: int
    left: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", self.size)


def progress() -> Progress:
    return Progress(Moments(torch.arange(4.0), 7), datetime(2026, 5, 1, 12, tzinfo=UTC), Path("/data/x"))


def test_values_come_back_in_their_types(checkpointer: Checkpointer) -> None:
    value = progress()
    plain = {"days": date(2026, 5, 1), "took": timedelta(days=-1, microseconds=5), "scale": np.float32(0.1)}
    checkpointer.save(None, None, 1, shared={"progress": value, "plain": plain}, own=value)
    restored = present(checkpointer.restore(shared={"progress": progress(), "plain": None}, own=None))
    found = restored.values["progress"]
    assert (type(found), type(found.moments)) == (Progress, Moments)
    assert torch.equal(found.moments.mean, value.moments.mean)
    assert (found.moments.number, found.began, found.folder, found._hidden) == (7, value.began, value.folder, 3)
    assert restored.values["plain"] == plain
    assert type(restored.values["plain"]["scale"]) is np.float32
    without = restored.values["own"]
    assert (type(without), type(without.moments), without.folder) == (Progress, Moments, Path("/data/x"))


def test_records_of_classes_that_are_not_loaded(checkpointer: Checkpointer) -> None:
    class Pair(NamedTuple):
        a: int
        b: int

    local = make_dataclass("Local", ["a"])
    checkpointer.save(None, None, 1, own=[local(3), Pair(1, 2)])
    restored = present(checkpointer.restore(own=None))
    assert restored.values["own"] == [SimpleNamespace(a=3), (1, 2)]


def test_a_dataclass_comes_back_without_a_call_of_its_constructor(checkpointer: Checkpointer) -> None:
    saved, template = Window(5), Window(9)
    object.__setattr__(saved, "left", 2)
    checkpointer.save(None, None, 1, window=saved)
    restored = present(checkpointer.restore(window=template))
    assert (restored.values["window"], template) == (saved, Window(9))


def test_without_objects_the_whole_checkpoint_comes_back(checkpointer: Checkpointer) -> None:
    model = nn.Linear(2, 3)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpointer.save(model, optim, 1, shared={"ema": {"w": torch.ones(2)}}, own=[1, 2])
    restored = present(checkpointer.restore())
    assert sorted(restored.values) == ["ema", "model", "optim", "own"]
    assert torch.equal(restored.values["model"]["weight"], model.weight)
    assert torch.equal(restored.values["ema"]["w"], torch.ones(2))
    assert restored.values["optim"]["groups"][0]["momentum"] == 0.9
    assert (restored.values["own"], restored.unused) == ([1, 2], [])


def test_objects_with_a_state_dict_can_be_shared(checkpointer: Checkpointer) -> None:
    model, twin = nn.Linear(2, 3), nn.Linear(2, 3)
    checkpointer.save(None, None, 1, shared={"averaged": model})
    checkpointer.restore(shared={"averaged": twin})
    names = checkpointer.load(names="averaged/*")
    assert torch.equal(twin.weight, model.weight)
    assert sorted(names) == ["averaged/bias", "averaged/weight"]


def test_every_save_may_hold_other_tensors(checkpointer: Checkpointer) -> None:
    model = nn.Linear(2, 3)
    for step in range(4):
        checkpointer.save(model, None, step, shared={"seen": {str(i): torch.full((2,), step) for i in range(step)}})
    for step in range(4):
        assert len(checkpointer.load(step, "seen/*")) == step


@pytest.mark.parametrize(
    ("shared", "said"), [({"model": 1}, "'model' is reserved"), ({"a/b": 1}, "slash"), ({"own": 1}, "given twice")]
)
def test_names_that_cannot_be(shared: dict[str, Any], said: str, checkpointer: Checkpointer) -> None:
    with pytest.raises(InvalidRequest, match=said):
        checkpointer.save(None, None, 1, shared=shared, own=2)
    with pytest.raises(InvalidRequest, match=said):
        checkpointer.restore(shared=shared, own=2)


def test_an_export_holds_what_is_shared_and_names_what_is_not(tmp_path: Path) -> None:
    state = {"w": torch.arange(40_000.0), "b": torch.arange(100.0)}
    with open_run(tmp_path / "store") as checkpointer:
        checkpointer.save(None, None, 1, shared={"lightning": {**state, "at": progress()}})
        checkpointer.save(None, None, 2, lightning=state, shared={"epoch": 3})
    to = tmp_path / "shared"
    for suffix in (".safetensors", ".pt"):
        assert invoke("export", "r@1", "--to", to.with_suffix(suffix), "--store", tmp_path / "store").code == 0
    assert sorted(load_file(to.with_suffix(".safetensors"))) == [
        "lightning/at/moments/mean", "lightning/b", "lightning/w",
    ]  # fmt: skip
    found = torch.load(to.with_suffix(".pt"), weights_only=True)["lightning"]
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["b"], state["b"])
    assert (found["at"]["moments"]["number"], found["at"]["folder"]) == (7, "/data/x")

    for suffix in (".safetensors", ".pt"):
        target = (tmp_path / "own").with_suffix(suffix)
        done = invoke("export", "r@2", "--to", target, "--store", tmp_path / "store")
        assert (done.code, target.exists()) == (3, True)
        assert "Wrote 0 entries" in done.stdout
        assert "left out, because each rank has its own: lightning (2 tensors)" in done.stderr
    assert torch.load(tmp_path / "own.pt", weights_only=True) == {"epoch": 3}
    part = invoke(
        "export", "r@2", "--to", tmp_path / "p.safetensors", "--names", "rank-*", "--store", tmp_path / "store"
    )
    assert (part.code, list(load_file(tmp_path / "p.safetensors"))) == (0, ["rank-00000/lightning/w"])


@pytest.mark.parametrize("batches", [0, 2])
def test_an_export_without_the_position_of_a_loader_is_whole(tmp_path: Path, batches: int) -> None:
    """Its tensors are states of generators, in mid-epoch and between epochs."""
    generator = torch.Generator()
    loader = resumable(DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True, generator=generator))
    with open_run(tmp_path / "store") as checkpointer:
        batch = iter(loader)
        for _ in range(batches):
            next(batch)
        checkpointer.save(nn.Linear(2, 2), None, 1, data=loader)
        checkpointer.save(nn.Linear(2, 2), None, 2, data=loader, own=torch.ones(3))
    done = succeed("export", "r@1", "--to", tmp_path / "a.pt", "--store", tmp_path / "store")
    assert re.search(r"without the positions of data loaders, .*: data \(\d+ tensors?\)", done.stderr)
    mixed = invoke("export", "r@2", "--to", tmp_path / "b.pt", "--store", tmp_path / "store")
    assert mixed.code == 3
    assert "left out, because each rank has its own: own (1 tensor)" in mixed.stderr


def test_two_ranks_keep_it_once(tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:save_and_restore", 2, {"store": str(tmp_path / "store")})
    assert run_scenario(scenario, tmp_path / "scenarios") == [[0.0, 1.0], [0.0, 1.0]]
    with open_run(tmp_path / "store") as checkpointer:
        assert list(checkpointer.load(names="*seen*")) == ["seen/w"]


def test_a_dataclass_that_contains_itself_is_refused(checkpointer: Checkpointer) -> None:
    value = progress()
    value.moments = value  # type: ignore[assignment]
    with pytest.raises(UnsupportedObject, match="nested more than 100 deep"):
        checkpointer.prepare(None, None, shared={"own": value})


def test_one_rank_saves_and_restores_alone(tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:solo", 2, {"store": str(tmp_path / "store")})
    (outcome,) = run_scenarios([scenario], tmp_path / "scenarios")
    (step, refused, divided), others = outcome.result()
    assert (step, others) == (1, [])
    assert "'optim/" in divided
    assert "is sharded over ranks" in divided
    assert "'model/bias' is sharded over ranks" in refused or "'model/weight' is sharded over ranks" in refused


def save_and_restore(store: str) -> list[float]:
    model = nn.Linear(2, 2)
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1, shared={"seen": {"w": torch.arange(2.0)}})
        restored = present(checkpointer.restore(model, shared={"seen": None}))
    found: Any = restored.values["seen"]["w"].tolist()
    return list(found)


def solo(store: str) -> list[Any]:
    """Rank 0 saves and restores alone while the other one waits for it; sharded state is refused."""
    mesh, sharded = init_device_mesh("cpu", (2,)), nn.Linear(4, 4)
    fully_shard(sharded, mesh=mesh)
    found: list[Any] = []
    whole = nn.Linear(4, 4)
    divided = ZeroRedundancyOptimizer(whole.parameters(), torch.optim.AdamW, lr=0.1)
    if dist.get_rank() == 0:
        model = nn.Linear(2, 2)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with Checkpointer(store, run="r", writer="thread", group="solo") as checkpointer:
            checkpointer.every(seconds=1000).due(0)
            checkpointer.save(model, optim, 1, shared={"x": torch.ones(1)})
            restored = present(checkpointer.restore(model, optim))
            found.append(restored.step)
            with Checkpointer(store, run="sharded", writer="thread", group="solo") as other:
                for unsaved, its_optim in ((sharded, None), (whole, divided)):
                    try:
                        other.save(unsaved, its_optim, 1)
                    except UnsupportedObject as error:
                        found.append(str(error))
    dist.barrier()
    return found
