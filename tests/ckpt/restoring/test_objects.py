"""Where restored tensors lie. The meta device stands for a GPU: its tensors are on another device than the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ckpt.capture.train_state import TrainState
from ckpt.restoring.destinations import Destinations
from ckpt.restoring.plan import NO_SURGERY
from ckpt.restoring.preparing import plan_restore
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import Content, Entries, Slices
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.ckpt.loops import open_run

EMPTY = Content(
    shards=[], entries=Entries([], [], []), slices=Slices(*[np.zeros(0, np.int64)] * 4), aliases={}, trees={}
)


def trained() -> tuple[nn.Module, AdamW]:
    model = nn.Linear(3, 3)
    optim = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optim.step()
    return model, optim


def test_a_step_count_that_lies_elsewhere_is_replaced(tmp_path: Path) -> None:
    model, optim = trained()
    other, other_optim = trained()
    for state in other_optim.state.values():
        state["step"] = state["step"].to("meta")
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1)
        checkpointer.restore(other, other_optim)
    assert [state["step"].item() for state in other_optim.state.values()] == [1.0, 1.0]
    other_optim.step()


@pytest.mark.parametrize(("kind", "expected"), [("meta", "meta"), ("xpu", "cpu")])
def test_values_return_to_the_current_device(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    tree = {"$": "tensor", "dtype": "float32", "shape": [1], "data": "AACAPw==", "device": kind}
    assert Destinations(EMPTY).decode(tree, "extra").device.type == expected


def moved(folder: Path, old: nn.Module, new: nn.Module, kind: Callable[..., Optimizer] = AdamW) -> list[Optimizer]:
    """One step of `old`, saved and restored into `new`. Returns the optimizers."""
    optimizers = [kind(model.parameters(), lr=0.1) for model in (old, new)]
    old(torch.ones(2, 4)).sum().backward()
    optimizers[0].step()
    with open_run(folder) as checkpointer:
        checkpointer.save(old, optimizers[0], 1)
        checkpointer.restore(new, optimizers[1])
    return optimizers


@pytest.mark.parametrize("stepped", [{0}, set()])
@pytest.mark.parametrize(
    ("old", "make", "named"),
    [(True, AdamW, True), (False, AdamW, False), (True, SGD, False), (True, partial(SGD, momentum=0.9), True)],
)
def test_a_checkpoint_of_an_older_version_that_lost_optimizer_state_names_it(
    tmp_path: Path, old: bool, make: Any, named: bool, stepped: set[int]
) -> None:
    """Those versions did not compare what ranks hold."""
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)])
    optim = make([{"params": list(part.parameters())} for part in model], lr=0.1)
    for part in stepped:
        for parameter in model[part].parameters():
            parameter.grad = torch.ones_like(parameter)
    optim.step()
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1)
    source = StoreSource(open_store(str(tmp_path)))
    manifest = replace(read_manifest(source, source.latest("r")), world_size=2)
    manifest = replace(manifest, extensions={}) if old else manifest
    plan = plan_restore(manifest, {}, TrainState.of(model, optim, {}), "rank-00000/", NO_SURGERY)
    lost = [f"optim/state/{part}.{name}" for part in {0, 1} - stepped for name in ("weight", "bias")]
    assert [name for name in plan.missing if name.startswith("optim")] == (lost if named else [])


class Flagged(nn.Linear):
    _version = 2
    version: int | None = None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.version = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize(("saved", "version"), [(nn.Linear, 1), (Flagged, 2)])
def test_a_load_method_of_a_module_gets_the_saved_version(tmp_path: Path, saved: type[nn.Linear], version: int) -> None:
    old, new = saved(4, 4), Flagged(4, 4)
    moved(tmp_path, old, new)
    assert new.version == version
    assert torch.equal(old.weight, new.weight)


class Bank(nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(4, 4)
        self.register_buffer("bank", torch.arange(float(size)))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.bank = torch.zeros_like(state[prefix + "bank"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_buffer_takes_its_shape_at_a_restore(tmp_path: Path) -> None:
    new = Bank(3)
    moved(tmp_path, Bank(7), new)
    assert torch.equal(new.bank, torch.arange(7.0))


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.register_load_state_dict_pre_hook(self.rename)  # type: ignore[no-untyped-call]

    @staticmethod
    def rename(_: nn.Module, state: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}0.{name}" in state:
                state[f"{prefix}trunk.{name}"] = state.pop(f"{prefix}0.{name}")

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.trunk(inputs)


def test_names_that_a_load_hook_changes_also_have_their_optimizer_state(tmp_path: Path) -> None:
    old, new = nn.Sequential(nn.Linear(4, 4)), Renamed()
    first, second = moved(tmp_path, old, new)
    for was, now in zip(old.parameters(), new.parameters(), strict=True):
        assert torch.equal(was, now)
        assert torch.equal(first.state[was]["exp_avg"], second.state[now]["exp_avg"])


def test_hooks_of_an_optimizer_run(tmp_path: Path) -> None:
    seen: list[object] = []

    def hooked(*args: Any, **options: Any) -> Optimizer:
        optimizer = AdamW(*args, **options)
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(mine=5))
        optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("mine")))
        optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
        return optimizer

    moved(tmp_path, nn.Linear(4, 4), nn.Linear(4, 4), hooked)
    assert seen == [5, "after"]


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.added = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.base(inputs) + self.added(inputs)

    def state_dict(self) -> Any:  # type: ignore[override]
        return {name: value.half() for name, value in self.added.state_dict().items()}

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        self.added.load_state_dict({name: value.float() for name, value in state.items()})


def test_a_module_that_shows_other_values_is_saved_and_restored(tmp_path: Path) -> None:
    old, new = Adapters(), Adapters()
    moved(tmp_path, old, new)
    assert torch.equal(old.added.weight.half().float(), new.added.weight)


def shared(kind: str, alike: bool = True) -> nn.Module:
    """Dense or expanded rows; two layers, apart or tied."""
    model, last = nn.Sequential(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4, bias=False)
    if kind in ("tied", "apart"):
        first = next(model.parameters())
        last.weight = first if kind == "tied" else nn.Parameter(first.detach().clone() if alike else torch.ones(4, 4))
        model.append(last)
    else:
        rows = torch.randn(1, 4).expand(3, 4)
        model.register_buffer("rows", rows if kind == "expanded" else rows.clone() if alike else torch.randn(3, 4))
    return model


@pytest.mark.parametrize(("old", "new"), [("apart", "tied"), ("dense", "expanded")])
@pytest.mark.parametrize("alike", [True, False])
def test_one_place_in_memory_takes_one_value(tmp_path: Path, old: str, new: str, alike: bool) -> None:
    saved, live = shared(old, alike), shared(new)
    before = [value.clone() for value in live.state_dict().values()]
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(saved, None, 1)
        if alike:
            checkpointer.restore(live)
            assert all(map(torch.equal, live.state_dict().values(), saved.state_dict().values()))
            return
        with pytest.raises(StateMismatch, match="one place of memory"):
            checkpointer.restore(live)
    assert all(map(torch.equal, live.state_dict().values(), before))


def test_optimizer_state_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model, optim = trained()
    other = nn.Linear(3, 3)
    other_optim = AdamW(other.parameters(), lr=0.1)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1)
        with torch.inference_mode():
            checkpointer.restore(other, other_optim)
    other(torch.ones(3)).sum().backward()
    other_optim.step()
