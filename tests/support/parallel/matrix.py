"""Saves in every layout, restores in every layout: what each rank does, and what must come out.

matrix = run_matrix([("fsdp2", "tp"), ("tp", "single")], folder)
check_restored(matrix, "fsdp2", "tp")
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt import Checkpointer
from tests.support.parallel.built import Built, Setup, seeded
from tests.support.parallel.layouts import LAYOUTS
from tests.support.parallel.model import Shape
from tests.support.parallel.referee import differences, full_state
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

SAVED_AT = 2
"""Steps before the checkpoint."""
STEPS_AFTER = 2
"""The loss of the first step depends on the weights, that of the second on the optimizer."""
SAVE = f"{__name__}:save"
RESTORE = f"{__name__}:restore"


def save(built: Built, step: int, folder: Path) -> None:
    """What is tested. Runs in every rank, and returns when the checkpoint is durable."""
    model: Any = built.model
    with Checkpointer(store=str(folder), run="matrix", writer="thread") as checkpointer:
        checkpointer.save_async(model, built.optim, step).result()


def restore(built: Built, folder: Path) -> None:
    """What is tested. Runs in every rank, into a model that was built with another seed and never trained."""
    model: Any = built.model
    with Checkpointer(store=str(folder), run="matrix", writer="thread") as checkpointer:
        assert checkpointer.restore(model, built.optim) is not None


@dataclass(frozen=True, slots=True)
class Matrix:
    """Outcomes by layout, and by pair of saved and restored layout."""

    folder: Path
    """Has a folder for each saved layout, with the store in it."""
    saved: dict[str, Outcome]
    restored: dict[tuple[str, str], Outcome]


def run_matrix(
    pairs: Sequence[tuple[str, str]],
    folder: Path,
    setup: Setup | None = None,
    save: str = SAVE,
    restore: str = RESTORE,
) -> Matrix:
    """Of each pair, save in the first layout and restore in the second; what is saved in a layout is saved once."""
    settings = asdict(setup or Setup())
    saved = list(dict.fromkeys(source for source, _ in pairs))
    scenarios = [
        Scenario(f"{__name__}:save_in", LAYOUTS[name].world_size, _arguments(name, settings, folder / name, save))
        for name in saved
    ]
    scenarios += [
        Scenario(
            f"{__name__}:restore_in", LAYOUTS[target].world_size, _arguments(target, settings, folder / source, restore)
        )
        for source, target in pairs
    ]
    for name in saved:
        (folder / name).mkdir()
    ranks = folder / "ranks"
    ranks.mkdir()
    outcomes = run_scenarios(scenarios, ranks)
    return Matrix(
        folder,
        dict(zip(saved, outcomes[: len(saved)], strict=True)),
        dict(zip(pairs, outcomes[len(saved) :], strict=True)),
    )


def check_restored(matrix: Matrix, saved: str, restored: str) -> None:
    """Bit-exact state, and the losses go on: to the bit in the same layout, and nearly so in another.

    Another layout adds in another order.
    """
    uninterrupted = matrix.saved[saved].result()[0]
    ranks = matrix.restored[saved, restored].result()
    assert ranks[0]["differences"] == []
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
    exactly = uninterrupted if saved == restored else pytest.approx(uninterrupted, rel=1e-5)
    assert ranks[0]["losses"] == exactly


def save_in(layout: str, setup: dict[str, Any], folder: str, hook: str) -> list[float]:
    """In a rank: train, save, and go on; returns the losses of the steps after the save."""
    built = _build(layout, _setup(setup))
    for step in range(SAVED_AT):
        built.train_step(step)
    _hook(hook)(built, SAVED_AT, Path(folder) / "store")
    state = full_state(built)
    if _rank() == 0:
        torch.save(state, Path(folder) / "expected.pt")
    return _go_on(built)


def restore_in(layout: str, setup: dict[str, Any], folder: str, hook: str) -> dict[str, Any]:
    """In a rank: restore into another model, compare with what was saved, and go on."""
    built = _build(layout, _setup({**setup, "seed": setup["seed"] + 1}))
    _hook(hook)(built, Path(folder) / "store")
    state = full_state(built)
    wrong = []
    if _rank() == 0:
        wrong = differences(state, torch.load(Path(folder) / "expected.pt", weights_only=True))
    return {"differences": wrong, "losses": _go_on(built)}


def _arguments(layout: str, setup: dict[str, Any], folder: Path, hook: str) -> dict[str, Any]:
    return {"layout": layout, "setup": setup, "folder": str(folder), "hook": hook}


def _setup(values: dict[str, Any]) -> Setup:
    return Setup(**{**values, "shape": Shape(**values["shape"])})


def _build(layout: str, setup: Setup) -> Built:
    seeded()
    return LAYOUTS[layout].build(setup)


def _go_on(built: Built) -> list[float]:
    return [built.train_step(step) for step in range(SAVED_AT, SAVED_AT + STEPS_AFTER)]


def _hook(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
