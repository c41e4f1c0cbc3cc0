from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptplan.history import contents, history
from ckptplan.model import per_parameter
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.format.records import SaveCost
from ckptstore.names import Attempt
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.support.checkpoints import write_checkpoint


def saved(step: int, at: float, durable_s: float, generation: int = 1, stored: int = 1000) -> Checkpoint:
    return Checkpoint(
        run="r", attempt=Attempt(step, "0" * 26, generation=generation), state=State.COMMITTED, created_at=at,
        committed_at=at + durable_s, raw_bytes=1200, stored_bytes=stored,
    )  # fmt: skip


def test_medians_of_the_newest_saves() -> None:
    checkpoints = [saved(step, 1000 + step * 2.0, durable_s=3.0) for step in (50, 40, 30, 20, 10)]
    found = history(checkpoints, [SaveCost(step=40, stall_s=0.3), SaveCost(step=30, stall_s=0.1, slowdown_s=0.5)])
    assert (found.durable_s, found.step_s) == (3.0, 2.0)
    assert (found.stall_s, found.slowdown_s, found.num_checkpoints) == (0.2, 0.5, 5)


def test_saves_of_another_size_do_not_count() -> None:
    first = saved(10, 1000, durable_s=90.0, stored=400)
    assert history([saved(20, 1020, durable_s=3.0), first]).durable_s == 3.0


def test_the_time_between_two_trainers_is_not_that_of_steps() -> None:
    checkpoints = [saved(30, 9000, 1.0, generation=2), saved(20, 1040, 1.0), saved(10, 1020, 1.0)]
    assert history(checkpoints).step_s == 2.0
    assert history(checkpoints[:2]).step_s is None


def test_unknown_costs_are_not_zero() -> None:
    found = history([saved(10, 1000, 1.0)])
    assert (found.stall_s, found.slowdown_s, found.step_s) == (None, None, None)


def test_the_bytes_of_a_checkpoint_by_kind() -> None:
    store, w = open_store("memory://contents"), np.zeros((3, 4), np.float32)
    arrays: dict[str, npt.NDArray[Any]] = {
        "model/w": w, "optim/state/w/exp_avg": w, "optim/state/w/exp_avg_sq": w.astype(np.float64),
        "optim/state/w/step": np.zeros((), np.float32), "ema/w": w,
    }  # fmt: skip
    checkpoint = write_checkpoint(store, "r", 1, arrays, clock=system_clock)
    model, terms = contents(checkpoint, read_manifest(StoreSource(store), checkpoint).content)
    assert (model.parameters, model.source) == (12, checkpoint.id)
    assert [(term.name, term.dtype, term.bytes_per_parameter * 12) for term in terms] == [
        ("weights", "float32", 48), ("momentum", "float32", 48), ("variance", "float64", 96), ("other", "", 52),
    ]  # fmt: skip
    assert per_parameter(terms) * 12 == pytest.approx(checkpoint.raw_bytes)
    assert {term.compressed for term in terms} == {checkpoint.needed_bytes / checkpoint.raw_bytes}
