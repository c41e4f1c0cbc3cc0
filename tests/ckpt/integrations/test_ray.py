from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt
from ckpt.integrations.ray import load, save
from ckptstore.errors import NoCheckpoint
from tests.ckpt.data.trained import Run, Samples
from tests.support.training import same_state


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    ckpt.init(str(tmp_path / "store"), run="r", writer="thread")
    yield tmp_path
    ckpt.close()


def new_run(seed: int) -> Run:
    return Run(lambda: torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True), seed)


def test_the_run_goes_on_from_the_checkpoint_that_ray_has_registered(store: Path) -> None:
    """The newer one was saved, and the worker was killed before its report."""
    run, states = new_run(0), {}
    batches = run.loader.endless()
    for step in range(3):
        run.step(next(batches))
        saved = save(folder := store / f"worker{step}", run.model, run.optim, step, **run.extras, metrics={"loss": 1.0})
        states[step] = {name: value.clone() for name, value in run.model.state_dict().items()}
        assert saved.step == step
        shutil.copytree(folder, store / f"kept{step}")
        assert [one.name for one in (store / f"kept{step}").iterdir()] == ["ckptd"]
    expected = run.step(next(batches))
    ckpt.init(str(store / "store"), run="r", writer="thread")
    last, earlier = new_run(1), new_run(2)
    assert load(store / "kept1", earlier.model, earlier.optim, **earlier.extras).step == 1
    assert same_state(dict(earlier.model.state_dict()), states[1])
    load(str(store / "kept2"), last.model, last.optim, **last.extras)
    assert last.step(next(last.loader.endless())) == expected


def test_a_folder_that_names_no_checkpoint_is_refused(store: Path) -> None:
    (store / "empty").mkdir()
    with pytest.raises(NoCheckpoint, match="empty names no checkpoint"):
        load(store / "empty")
    run = new_run(0)
    save(store / "kept", run.model, run.optim, 1)
    (store / "kept" / "ckptd").write_text('{"ckptd": "r@77"}')
    with pytest.raises(NoCheckpoint):
        load(store / "kept", run.model, run.optim)
