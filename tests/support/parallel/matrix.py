"""Saves in every layout, restores in every layout: what each rank does, and what must come out.

matrix = run_matrix([("fsdp2", "tp"), ("tp", "single")], folder)
check_restored(matrix, "fsdp2", "tp")
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    """Of each pair, save in the first layout and restore in the second.

    Each layout saves once, and one group of ranks restores everything that a layout restores: starting a group costs
    more than a restore.
    """
    common = {"setup": asdict(setup or Setup()), "folder": str(folder)}
    saved = list(dict.fromkeys(source for source, _ in pairs))
    sources = {target: [one for one, other in pairs if other == target] for _, target in pairs}
    scenarios = [_scenario("save_in", name, {**common, "hook": save}, 1) for name in saved]
    scenarios += [
        _scenario("restore_in", target, {**common, "hook": restore, "sources": some}, len(some))
        for target, some in sources.items()
    ]
    for name in saved:
        (folder / name).mkdir()
    ranks = folder / "ranks"
    ranks.mkdir()
    outcomes = run_scenarios(scenarios, ranks)
    restored = zip(sources.items(), outcomes[len(saved) :], strict=True)
    return Matrix(
        folder,
        dict(zip(saved, outcomes[: len(saved)], strict=True)),
        {
            (source, target): Outcome([results[number] for results in outcome.results], outcome.error)
            for (target, some), outcome in restored
            for number, source in enumerate(some)
        },
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
    place = Path(folder, layout)
    _hook(hook)(built, SAVED_AT, place / "store")
    state = full_state(built)
    if _rank() == 0:
        (place / "expected.pickle").write_bytes(pickle.dumps(state))
    return _go_on(built)


def restore_in(layout: str, setup: dict[str, Any], folder: str, hook: str, sources: list[str]) -> list[dict[str, Any]]:
    """In a rank: restore each source into another model, compare with what was saved, and go on."""
    found = []
    for number, source in enumerate(sources):
        print(f"{layout} restores {source}", flush=True)
        built = _build(layout, _setup({**setup, "seed": setup["seed"] + 1 + number}))
        place = Path(folder, source)
        _hook(hook)(built, place / "store")
        state = full_state(built)
        wrong = []
        if _rank() == 0:
            wrong = differences(state, pickle.loads((place / "expected.pickle").read_bytes()))
        found.append({"differences": wrong, "losses": _go_on(built)})
    return found


def _scenario(function: str, layout: str, arguments: dict[str, Any], times: int) -> Scenario:
    world_size = LAYOUTS[layout].world_size
    return Scenario(f"{__name__}:{function}", world_size, {"layout": layout, **arguments}, timeout_s=60.0 * times)


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
