"""Saves by several ranks: without collectives, with replicas written together, and after the layout has changed."""

from __future__ import annotations

import copy
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
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt import Checkpointer
from ckpt.ranks.world import World
from ckpt.snapshot.agreement import LayoutAgreement
from ckptstore.errors import CkptError, RankLost
from ckptstore.format.planning import derived_bytes, entry_bytes
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.support.parallel.built import Built, Setup
from tests.support.parallel.layouts import LAYOUTS
from tests.support.parallel.matrix import Matrix, check_restored, run_matrix
from tests.support.parallel.runner import Outcome, Scenario, logged, run_named
from tests.support.training import same_state
from tests.support.waiting import present

_LAYOUTS = ("ddp", "fsdp2", "tp_fsdp2", "fsdp1", "zero", "pp")
RUN = "saving"
_SPREAD = [("ddp", "ddp"), ("ddp", "single"), ("hsdp", "fsdp2"), ("hsdp", "hsdp")]


class Trained:
    """What a program trains, which changes between two saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Module()
        self.model.body, self.model.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.model.register_buffer("seen", torch.zeros(3))
        self.model.body.requires_grad_(False)
        self.optim: torch.optim.Optimizer | None = torch.optim.AdamW(self.model.head.parameters(), 0.1)
        self.more: dict[str, Any] = {}
        self.critic: torch.optim.Optimizer | None = None
        self.step()

    @property
    def optims(self) -> Any:
        return {name: one for name, one in (("main", self.optim), ("critic", self.critic)) if one is not None} or None

    def step(self) -> None:
        for one in (self.optim, self.critic):
            for parameter in [p for group in one.param_groups for p in group["params"]] if one is not None else ():
                parameter.grad = torch.ones_like(parameter)
            if one is not None:
                one.step()

    def save(self, checkpointer: Checkpointer, step: int) -> Any:
        return checkpointer.save_async(self.model, self.optims, step, **self.more)

    def restores_equal(self, checkpointer: Checkpointer, step: int) -> bool:
        """Whether a copy that is filled with zeros gets all values back."""
        checkpointer.wait()
        other = copy.deepcopy(self)
        values = [
            *other.model.state_dict().values(),
            *(v for one in other.more.values() for v in one.state_dict().values()),
        ]
        for value in values:
            value.zero_()
        restored = present(checkpointer.restore(other.model, other.optims, **other.more))
        pairs = [(self.model, other.model), *((one, other.more[name]) for name, one in self.more.items())]
        same = all(same_state(one.state_dict(), two.state_dict()) for one, two in pairs)
        states = [[one.state_dict() for one in (made.optim, made.critic) if one is not None] for made in (self, other)]
        return restored.step == step and same and same_state(states[0], states[1])


def _unfreeze(made: Trained) -> None:
    made.model.body.requires_grad_(True)
    assert made.optim is not None
    made.optim.add_param_group({"params": list(made.model.body.parameters()), "lr": 0.01})


def _rebuild(made: Trained, **options: Any) -> None:
    made.optim = torch.optim.SGD(made.model.head.parameters(), 0.1, momentum=0.9, **options)


def _replace_head(made: Trained) -> None:
    made.model.head = nn.Linear(4, 5)
    _rebuild(made)


def _cast(made: Trained) -> None:
    made.model.to(torch.bfloat16)
    _rebuild(made)


def _densify(made: Trained) -> None:
    made.model.head.weight = nn.Parameter(torch.randn(3, 4))
    made.model.head.bias = nn.Parameter(torch.randn(3))
    made.optim = torch.optim.AdamW(made.model.head.parameters(), 0.1)


def _add_critic(made: Trained) -> None:
    made.more["value"] = nn.Linear(4, 1)
    made.critic = torch.optim.AdamW(made.more["value"].parameters(), 0.1)


def _add_adapters(made: Trained) -> None:
    made.model.body.adapter = nn.Linear(4, 2)
    assert made.optim is not None
    made.optim.add_param_group({"params": list(made.model.body.adapter.parameters())})


CHANGES: dict[str, Callable[[Trained], Any]] = {
    "unfrozen": _unfreeze,
    "new-head": _replace_head,
    "pruned": lambda made: prune.l1_unstructured(made.model.body, "weight", 0.5),  # type: ignore[no-untyped-call]
    "parametrized": lambda made: parametrize.register_parametrization(made.model.body, "weight", nn.Identity()),
    "buffer-grows": lambda made: made.model.register_buffer("seen", torch.arange(7.0)),
    "new-buffer": lambda made: made.model.register_buffer("more", torch.arange(2)),
    "buffer-gone": lambda made: delattr(made.model, "seen"),
    "densified": _densify,
    "average": lambda made: made.more.update(average=torch.optim.swa_utils.AveragedModel(made.model.body)),
    "critic": _add_critic,
    "cast": _cast,
    "another-optimizer": _rebuild,
    "no-optimizer": lambda made: setattr(made, "optim", None),
    "module-gone": lambda made: delattr(made.model, "body"),
    "adapters": _add_adapters,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saving")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    scenarios = {}
    for layout in _LAYOUTS:
        arguments = {"store": str(folder / layout), "layout": layout}
        scenarios[layout] = Scenario(f"{__name__}:without_collectives", 4 if layout == "tp_fsdp2" else 2, arguments)
    for name in ("change_layout", "change_everywhere", "fail_to_describe", "leave_after_restore", "derive_under_fsdp2"):
        scenarios[name] = Scenario(f"{__name__}:{name}", 2, {"store": str(folder / name)})
    return run_named(scenarios, folder / "ranks")


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_no_rank_meets_another_in_a_save_after_the_first(outcomes: dict[str, Outcome], layout: str) -> None:
    """Whatever would have made it wait raises; the first save was made before optimizers had any state."""
    for result in outcomes[layout].result():
        assert (result["steps"], result["caught"]) == ([1, 2, 3], [True] * 4)


def test_a_layout_changed_on_one_rank_is_an_error_until_all_prepare(outcomes: dict[str, Outcome], folder: Path) -> None:
    first, second = outcomes["change_layout"].result()
    assert second["code"] == "layout_changed"
    assert "on rank 1 'model/1." in second["said"]
    assert "rank 0 of 2 sent no heartbeat for 6 s" in second["said"]
    assert "prepare()" in second["said"]
    assert first["code"] == "rank_failed"
    assert "rank 1 could not save step 2 of run 'saving': layout_changed: " in first["said"]
    for result in (first, second):
        assert (result["restored"], result["ones"]) == (3, True)
    source = StoreSource(open_store(str(folder / "change_layout")))
    assert [checkpoint.step for checkpoint in source.checkpoints(RUN)] == [3, 1]


def test_ranks_whose_layout_changes_in_the_same_save_agree_again(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["change_everywhere"].result()
    for result in (first, second):
        assert result["restored"] == [[name, True] for name in CHANGES]
        assert result["agreed"] == ["kept", *["met"] * len(CHANGES)]
    assert (first["warnings"], second["warnings"]) == (1, 0)


def test_a_rank_that_leaves_after_a_restore_fails_it_on_no_other_one(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["leave_after_restore"].result() == [[1, 2], [1, 2]]


@pytest.mark.parametrize("name", CHANGES)
def test_one_process_agrees_with_itself(name: str, tmp_path: Path) -> None:
    made = Trained()
    with Checkpointer(str(tmp_path), run=RUN, writer="thread") as checkpointer:
        made.save(checkpointer, 1)
        CHANGES[name](made)
        made.step()
        handle = made.save(checkpointer, 2)
        made.step()
        made.save(checkpointer, 3)
        assert handle.result().step == 2
        assert made.restores_equal(checkpointer, 3)


def test_a_rank_that_cannot_describe_its_state_tells_the_others_at_once(outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes["fail_to_describe"].result()
    assert "rank 1: it failed with RuntimeError('a hook of rank 1 fails')" in first["said"]
    assert second["said"] == "a hook of rank 1 fails"


@pytest.mark.parametrize("split_replicas", [False, True])
def test_ranks_derive_their_slices_of_shards(outcomes: dict[str, Outcome], folder: Path, split_replicas: bool) -> None:
    for result in outcomes["derive_under_fsdp2"].result():
        assert result["alike"] == [True] * 8
    source = StoreSource(open_store(str(folder / "derive_under_fsdp2" / str(split_replicas))))
    content = read_manifest(source, source.latest(RUN)).content
    assert derived_bytes(content) == {f"model/{layer}.weight": 2 * 256 * 512 for layer in (0, 1)}


def test_unmarked_state_of_a_shard_is_refused(outcomes: dict[str, Outcome]) -> None:
    """It would be taken for what all ranks hold alike; equal state beside it may be."""
    results = outcomes["derive_under_fsdp2"].result()
    assert [result["code"] for result in results] == ["unsupported_object", "rank_failed"]
    for result in results:
        assert "ranks 0 and 1 hold different 'optim/state/0.weight/master'" in result["said"]


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


_HARMLESS = ("get_", "is_", "supports_", "destroy_", "init_", "record_")
_MEETINGS = ("gather", "decide", "gather_alike", "exchange_group")


def without_collectives(store: str, layout: str) -> dict[str, Any]:
    """Saves after the first one, while whatever makes ranks wait for each other raises. The first is before step 0."""
    built = LAYOUTS[layout].build(Setup())
    model: Any = built.model
    steps = []
    with Checkpointer(store, run=RUN, writer="process" if layout == "ddp" else "thread") as checkpointer:
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
    with Checkpointer(store, run=RUN, writer="thread", peer_timeout_s=10) as checkpointer:
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
        restored = present(checkpointer.restore(other))
    return found | {"restored": restored.step, "ones": all(bool((p == 1).all()) for p in other.parameters())}


def change_everywhere(store: str) -> dict[str, Any]:
    """Both ranks hold the same, of which rank 0 writes all, and change it in the same save."""
    agreed, restored = [], []
    with Checkpointer(store, run=RUN, writer="thread", peer_timeout_s=100) as checkpointer, logged() as lines:
        before = Trained()
        before.save(checkpointer, 1)
        before.step()
        with forbidden():
            before.save(checkpointer, 2)
        agreed.append("kept")
        for number, name in enumerate(CHANGES):
            made = Trained()
            CHANGES[name](made)
            made.step()
            for step in (2 * number + 3, 2 * number + 4):
                made.save(checkpointer, step)
            agreed.append("met")
            restored.append((name, made.restores_equal(checkpointer, 2 * number + 4)))
    return {"restored": restored, "agreed": agreed, "warnings": sum("wait for each other" in line for line in lines)}


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
                checkpointer.save(model, _Masters(model, sharded=False), 2)
            except CkptError as error:
                found |= {"code": error.code, "said": str(error)}
    return found


def leave_after_restore(store: str) -> list[int]:
    """Rank 0 does not come when memory is made ready after the restore. The meeting of the next save is in step."""
    made = Trained()
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        made.save(checkpointer, 1).result(60)
    leaves = patch.object(LayoutAgreement, "_meet", side_effect=RankLost("gone", "")) if not dist.get_rank() else None
    with Checkpointer(store, run=RUN, writer="thread") as checkpointer:
        with leaves or patch("ckpt.ranks.world._APART_S", 1.0):
            restored = present(checkpointer.restore(made.model, made.optims))
        return [restored.step, made.save(checkpointer, 2).result(60).step]


def fail_to_describe(store: str) -> dict[str, str]:
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
    model: Any = built.model
    with Checkpointer(store=str(folder), run="matrix", writer="thread", split_replicas=True) as checkpointer:
        checkpointer.save(model, built.optim, step)
