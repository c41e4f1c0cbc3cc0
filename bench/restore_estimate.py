"""How well `ckptctl verify --ranks` predicts a real restore of the same checkpoint on the same machine.

Verifications and restores of a trained state take turns, both from files in the page cache, with chunks as they are and
with compressed ones. The prediction is for one rank. The verification uses no torch, the restore is that of a trainer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench.durable_disk import CODINGS
from bench.measuring import Spread, in_turns, seconds
from bench.ours import Ours
from bench.report import Goal, Report
from bench.state import State, trained, wanted_bytes
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store

GOAL = 0.3
REPETITIONS = 15


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system."""
    state = trained("fp32", wanted_bytes(quick))
    contestants: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        for coding, compress in CODINGS.items():
            ours = Ours(folder, compress=compress)
            stack.enter_context(ours)
            ours.save(state, folder)
            contestants[f"{coding}, predicted"] = partial(_predicted, ours, folder)
            contestants[f"{coding}, restored"] = partial(_restored, ours, folder, state)
        for call in contestants.values():
            call()  # reads the files into the page cache
        found, problems = in_turns(contestants, REPETITIONS)
    spreads = {name: Spread.of(values) for name, values in found.items()}
    ratios = {
        coding: spreads[f"{coding}, predicted"].median / spreads[f"{coding}, restored"].median for coding in CODINGS
    }
    return Report(
        bench="restore-estimate",
        what=f"{state.num_bytes / 1e9:.2f} GB, one rank, median (quartiles) of {REPETITIONS} in turns",
        columns=("", "seconds"),
        rows=[(name, str(spread)) for name, spread in spreads.items()],
        goals=[
            Goal(f"{coding}, deviation of the prediction", "real restore", abs(ratio - 1), GOAL, "at most")
            for coding, ratio in ratios.items()
        ],
        problems=problems,
        state_bytes=state.num_bytes,
        facts={f"{coding}, predicted / restored": ratio for coding, ratio in ratios.items()},
    )


def _predicted(ours: Ours, folder: Path) -> float:
    """The estimate of a verification, in seconds."""
    found = verify(StoreSource(open_store(ours.store)), ours.saved[folder], ranks=())
    assert not found.problems, found.problems
    (estimate,) = found.estimates
    assert estimate.restore_s is not None
    return estimate.restore_s


def _restored(ours: Ours, folder: Path, state: State) -> float:
    state.forget()
    return seconds(partial(ours.load, folder, state))
