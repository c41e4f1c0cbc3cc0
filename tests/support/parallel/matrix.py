"""Saves in every layout, restores in every layout: what each rank does, and what must come out.

matrix = run_matrix([("fsdp2", "tp"), ("tp", "single")], folder)
check_restored(matrix, "fsdp2", "tp")
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
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
Work = dict[str, Any]
"""One save or restore of a group of ranks, as JSON: its layout, the grid with its folder and setup, and, of a restore,
the layout that saved."""


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


@dataclass(frozen=True, slots=True)
class Grid:
    """Pairs of saved and restored layout, of one kind of model."""

    pairs: Sequence[tuple[str, str]]
    setup: Setup = field(default_factory=Setup)


def run_matrix(pairs: Sequence[tuple[str, str]], folder: Path, save: str = SAVE, restore: str = RESTORE) -> Matrix:
    return run_matrices({"only": Grid(pairs)}, folder, save, restore)["only"]


def run_matrices(
    grids: Mapping[str, Grid], folder: Path, save: str = SAVE, restore: str = RESTORE
) -> dict[str, Matrix]:
    """Of each pair of each grid, save in the first layout and restore in the second.

    One group of ranks does all the saves of its size, and one all the restores: starting a group, and the first use of
    a layout's modules, cost more than a restore.
    """
    saves: dict[int, list[Work]] = {}
    restores: dict[int, list[Work]] = {}
    for name, grid in grids.items():
        own: Work = {"grid": name, "folder": str(folder / name), "setup": asdict(grid.setup)}
        for source in dict.fromkeys(source for source, _ in grid.pairs):
            (folder / name / source).mkdir(parents=True)
            saves.setdefault(LAYOUTS[source].world_size, []).append({**own, "layout": source})
        for source, target in grid.pairs:
            work = {**own, "layout": target, "source": source}
            restores.setdefault(LAYOUTS[target].world_size, []).append(work)
    scenarios = [_scenario("save_in", world_size, works, save) for world_size, works in saves.items()]
    scenarios += [_scenario("restore_in", world_size, works, restore) for world_size, works in restores.items()]
    ranks = folder / "ranks"
    outcomes = iter(run_scenarios(scenarios, ranks))
    found = {name: Matrix(folder / name, {}, {}) for name in grids}
    for works in saves.values():
        for work, outcome in zip(works, _each(next(outcomes), len(works)), strict=True):
            found[work["grid"]].saved[work["layout"]] = outcome
    for works in restores.values():
        for work, outcome in zip(works, _each(next(outcomes), len(works)), strict=True):
            found[work["grid"]].restored[work["source"], work["layout"]] = outcome
    return found


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


def save_in(works: list[Work], hook: str) -> list[list[float]]:
    """In a rank: train, save, and go on; returns, of each work, the losses of the steps after the save."""
    found = []
    for work in works:
        layout = work["layout"]
        print(f"{layout} saves {work['grid']}", flush=True)
        built = _build(layout, _setup(work["setup"]))
        for step in range(SAVED_AT):
            built.train_step(step)
        place = Path(work["folder"], layout)
        _hook(hook)(built, SAVED_AT, place / "store")
        state = full_state(built)
        if _rank() == 0:
            (place / "expected.pickle").write_bytes(pickle.dumps(state))
        found.append(_go_on(built))
    return found


def restore_in(works: list[Work], hook: str) -> list[dict[str, Any]]:
    """In a rank: restore each work's source into another model, compare with what was saved, and go on."""
    found = []
    for number, work in enumerate(works):
        layout = work["layout"]
        print(f"{layout} restores {work['grid']} from {work['source']}", flush=True)
        setup = work["setup"]
        built = _build(layout, _setup({**setup, "seed": setup["seed"] + 1 + number}))
        place = Path(work["folder"], work["source"])
        _hook(hook)(built, place / "store")
        state = full_state(built)
        wrong = []
        if _rank() == 0:
            wrong = differences(state, pickle.loads((place / "expected.pickle").read_bytes()))
        found.append({"differences": wrong, "losses": _go_on(built)})
    return found


def _scenario(function: str, world_size: int, works: list[Work], hook: str) -> Scenario:
    arguments = {"works": works, "hook": hook}
    return Scenario(f"{__name__}:{function}", world_size, arguments, timeout_s=60.0 * len(works))


def _each(outcome: Outcome, works: int) -> list[Outcome]:
    """Of each work that a group of ranks did; all have its error."""
    return [Outcome([results[number] for results in outcome.results], outcome.error) for number in range(works)]


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
