"""Saves by several ranks: without collectives, with replicas written together, and after the layout has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckptstore.errors import CkptError
from ckptstore.format.planning import derived_bytes, entry_bytes
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.support.parallel.built import Built, Setup
from tests.support.parallel.layouts import LAYOUTS
from tests.support.parallel.matrix import Matrix, check_restored, run_matrix
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_LAYOUTS = ("ddp", "fsdp2", "tp_fsdp2", "fsdp1", "zero", "pp")
_SPREAD = [("ddp", "ddp"), ("ddp", "single"), ("hsdp", "fsdp2"), ("hsdp", "hsdp")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    scenarios = {
        layout: Scenario(
            f"{__name__}:without_collectives",
            4 if layout == "tp_fsdp2" else 2,
            {"store": str(folder / layout), "layout": layout},
        )
        for layout in _LAYOUTS
    }
    for name in ("change_layout", "fail_to_describe", "derive_under_fsdp2"):
        scenarios[name] = Scenario(f"{__name__}:{name}", 2, {"store": str(folder / name)})
    (folder / "ranks").mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder / "ranks"), strict=True))


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_no_rank_meets_another_in_a_save_after_the_first(outcomes: dict[str, Outcome], layout: str) -> None:
    """Whatever would have made it wait raises; the first save was made before optimizers had any state."""
    for result in outcomes[layout].result():
        assert result["steps"] == [1, 2, 3]
        assert result["caught"] == [True] * 4


def test_a_layout_changed_on_one_rank_is_an_error_until_all_prepare(outcomes: dict[str, Outcome], folder: Path) -> None:
    first, second = outcomes["change_layout"].result()
    assert second["code"] == "layout_changed"
    assert "on rank 1 'model/1." in second["said"]
    assert "prepare()" in second["said"]
    assert first["code"] == "rank_failed"
    assert "rank 1 could not save step 2 of run 'saving': layout_changed: " in first["said"]
    for result in (first, second):
        assert (result["restored"], result["ones"]) == (3, True)
    source = StoreSource(open_store(str(folder / "change_layout")))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [3, 1]


def test_a_rank_that_cannot_describe_its_state_tells_the_others_at_once(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["fail_to_describe"].result()
    assert "rank 1: cannot describe its state: RuntimeError('a hook of rank 1 fails')" in first["said"]
    assert second["said"] == "a hook of rank 1 fails"


@pytest.mark.parametrize("split_replicas", [False, True])
def test_ranks_derive_their_slices_of_shards(outcomes: dict[str, Outcome], folder: Path, split_replicas: bool) -> None:
    for result in outcomes["derive_under_fsdp2"].result():
        assert result["alike"] == [True] * 8
    source = StoreSource(open_store(str(folder / "derive_under_fsdp2" / str(split_replicas))))
    content = read_manifest(source, source.latest(RUN)).content
    assert derived_bytes(content) == {f"model/{layer}.weight": 2 * 256 * 512 for layer in (0, 1)}


def test_unmarked_state_of_a_shard_is_refused(outcomes: dict[str, Outcome]) -> None:
    """It would be taken for what all ranks hold alike."""
    for result in outcomes["derive_under_fsdp2"].result():
        assert result["code"] == "unsupported_object"
        assert "optim/state/0.weight/" in result["said"]


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return run_matrix(_SPREAD, tmp_path_factory.mktemp("spread"), save=f"{__name__}:save_spread")


@pytest.mark.parametrize(("saved", "restored"), _SPREAD)
def test_what_replicas_have_written_together_is_restored(spread: Matrix, saved: str, restored: str) -> None:
    check_restored(spread, saved, restored)


@pytest.mark.parametrize(("layout", "writers"), [("ddp", 2), ("hsdp", 4)])
def test_replicas_write_about_as_many_bytes(spread: Matrix, layout: str, writers: int) -> None:
    source = StoreSource(open_store(str(spread.folder / layout / "store")))
    content = read_manifest(source, source.latest("matrix")).content
    written = {shard.rank: int(shard.chunks.raw.sum()) for shard in content.shards}
    assert sorted(written) == list(range(writers))
    # A parameter and what its optimizer keeps stay together.
    largest = 3 * max(entry_bytes(content).values())
    assert max(written.values()) - min(written.values()) <= largest
    assert max(written.values()) < 1.5 * sum(written.values()) / writers


RUN = "saving"

_HARMLESS = ("get_", "is_", "supports_", "destroy_", "init_", "record_")
_MEETINGS = ("gather", "decide", "gather_alike", "broadcast", "exchange_group")


def without_collectives(store: str, layout: str) -> dict[str, Any]:
    """Saves after the first one, while whatever makes ranks wait for each other raises. The first is before step 0."""
    built = LAYOUTS[layout].build(Setup())
    model: Any = built.model
    steps = []
    with Checkpointer(store, run=RUN) as checkpointer:
        checkpointer.save(model, built.optim, 0)
        for step in (1, 2, 3):
            built.train_step(step)
            with forbidden():
                handle = checkpointer.save_async(model, built.optim, step)
            steps.append(handle.result(60).step)
    return {"steps": steps, "caught": _caught(built)}


def _caught(built: Built) -> list[bool]:
    """Whether the trap works: for a function, a method of a group, a tensor, and a meeting."""
    group: Any = dist.group.WORLD
    whole = next(p for chunk in built.chunks for p in chunk.parameters())
    attempts: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: group.allreduce([torch.zeros(1)]),
        lambda: whole.full_tensor() if hasattr(whole, "full_tensor") else dist.all_reduce(whole.detach()),
        lambda: World(1).gather(None),
    ]
    return [_raises(attempt) for attempt in attempts]


def _raises(attempt: Callable[[], Any]) -> bool:
    with forbidden():
        try:
            attempt()
        except Met:
            return True
    return False


class Met(Exception):
    """Ranks were about to wait for each other."""


class _NoCollective(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that this thread asks of torch, also those that C++ asks for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor"):
            raise Met(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def forbidden() -> Iterator[None]:
    """Every collective of torch and every meeting of ours raises."""

    def refuse(*_: object, **__: object) -> None:
        raise Met

    names = [name for name in distributed_c10d.__all__ if not name.startswith(_HARMLESS)]
    functions = [name for name in names if type(getattr(distributed_c10d, name)) is FunctionType]
    assert {"all_reduce", "barrier", "all_gather_object", "send", "new_group"} <= set(functions)
    places = [*((distributed_c10d, name) for name in functions), *((World, name) for name in _MEETINGS)]
    places += [(dist, name) for name in functions if hasattr(dist, name)]
    patches = [patch.object(place, name, refuse) for place, name in places]
    for one in patches:
        one.start()
    try:
        with _NoCollective():  # type: ignore[no-untyped-call]
            yield
    finally:
        for one in patches:
            one.stop()


def change_layout(store: str) -> dict[str, Any]:
    """Rank 1 gets a parameter that the others do not know of; later all have it, and prepare."""
    torch.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(3, 3)), {}
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        checkpointer.save(model, None, 1)
        if dist.get_rank() == 1:
            model.append(nn.Linear(3, 3))
        try:
            checkpointer.save_async(model, None, 2).result(60)
        except CkptError as error:
            found = {"code": error.code, "said": str(error)}
        if dist.get_rank() == 0:
            model.append(nn.Linear(3, 3))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        checkpointer.prepare(model, None)
        checkpointer.save(model, None, 3)
        other = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        restored = checkpointer.restore(other)
    assert restored is not None
    return found | {"restored": restored.step, "ones": all(bool((p == 1).all()) for p in other.parameters())}


class _Masters(torch.optim.Optimizer):
    """Keeps float32 masters, as training in mixed precision does, and sets the weights to their casts."""

    def __init__(self, model: nn.Module, sharded: bool) -> None:
        """sharded: as the parameters are; otherwise as plain tensors of what lies here."""
        super().__init__(model.parameters(), {})
        for parameter in self.param_groups[0]["params"]:
            weight = parameter.detach() if sharded else parameter.detach().to_local()
            master = weight.float() * 1.001
            weight.copy_(master)
            self.state[parameter] = {"exp_avg": torch.ones_like(master), "master": master}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not used."""


def derive_under_fsdp2(store: str) -> dict[str, Any]:
    """Each rank derives its slices of the weights from its slices of the masters, wherever they are written from."""
    found: dict[str, Any] = {"alike": []}
    for split_replicas in (False, True):
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)).to(torch.bfloat16) for _ in range(2))
        for one in (model, other):
            fully_shard(one, mesh=init_device_mesh("cpu", (2,)))
        optim, other_optim = _Masters(model, sharded=True), _Masters(other, sharded=True)
        with Checkpointer(
            f"{store}/{split_replicas}", run=RUN, dedup_casts=True, split_replicas=split_replicas, writer="thread"
        ) as checkpointer:
            checkpointer.save(model, optim, 1)
            checkpointer.restore(other, other_optim)
            pairs = zip(model.parameters(), other.parameters(), strict=True)
            found["alike"] += [torch.equal(first.to_local(), second.to_local()) for first, second in pairs]  # type: ignore[attr-defined]
            try:
                checkpointer.save_async(model, _Masters(model, sharded=False), 2)
            except CkptError as error:
                found |= {"code": error.code, "said": str(error)}
    return found


def fail_to_describe(store: str) -> dict[str, str]:
    """Rank 1 cannot say what it holds."""
    model = nn.Linear(3, 3)
    if dist.get_rank() == 1:
        model.register_state_dict_pre_hook(_broken)  # type: ignore[no-untyped-call]
    with Checkpointer(store, run=RUN, writer="thread", peer_timeout_s=30) as checkpointer:
        try:
            checkpointer.save_async(model, None, 1)
        except Exception as error:
            return {"said": str(error)}
    return {"said": "saved"}


def _broken(*_: object) -> None:
    raise RuntimeError("a hook of rank 1 fails")


def save_spread(built: Built, step: int, folder: Path) -> None:
    """For the matrix: replicas share the writing."""
    model: Any = built.model
    with Checkpointer(store=str(folder), run="matrix", writer="thread", split_replicas=True) as checkpointer:
        checkpointer.save(model, built.optim, step)
