"""A restore in stages: each object when it exists, one checkpoint, random state last."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import ckpt
from ckpt import Checkpointer
from ckptstore.errors import InvalidRequest
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.ckpt.data.trained import Samples
from tests.support.training import same_state, seed_all
from tests.support.waiting import wait_until


def open_run(folder: Path) -> Checkpointer:
    return Checkpointer(str(folder), run="r", writer="thread")


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    seed_all(seed)
    model = nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optim.step()
    return model, optim


def leases(folder: Path) -> int:
    return sum(1 for _ in open_store(str(folder)).list(Run(open_store(str(folder)), "r").keys.leases))


def test_objects_are_restored_as_they_are_built(tmp_path: Path) -> None:
    model, optim = trained(0)
    batches: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    going = iter(batches)
    next(going)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1, loader=batches, shared={"note": "x"})
        checkpointer.save(model, optim, 2, loader=batches, shared={"note": "y"})
        expected = [batch.tolist() for batch in going] + [random.random(), float(torch.rand(()))]
    other, _ = trained(5)
    loader: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages(checkpoint=1) as stages:
            stages.model(other)
            assert same_state(other.state_dict(), model.state_dict())
            with torch.no_grad():
                other.get_parameter("weight").zero_()
            late = torch.optim.AdamW(other.parameters(), lr=0.5)
            stages.optimizers(late)
            restored = stages.extras(loader=loader, shared={"note": None})
            assert restored is not None
            assert restored.values == {"note": "x"}
            assert stages.restored is restored
            wait_until(lambda: leases(tmp_path) == 1)  # of the extras; that of the model is released in a thread
            seed_all(9)
        assert torch.count_nonzero(other.get_parameter("weight")) == 0, "the model is not read again"
        assert same_state(late.state_dict(), optim.state_dict())
        seed_all(9)
        found = [batch.tolist() for batch in loader] + [random.random(), float(torch.rand(()))]
        assert found == expected
        checkpointer.save(other, late, 2)  # after the restored step: the same lineage


def test_random_state_is_put_back_when_it_is_asked_for_or_at_the_end(tmp_path: Path) -> None:
    model, optim = trained(0)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(model, optim, 1)
        expected = random.random()
        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            assert random.random() != expected
        assert random.random() == expected
        with checkpointer.restore_in_stages() as stages:
            stages.model(model)
            stages.rng()
            assert random.random() == expected
        assert random.random() != expected
        with contextlib.suppress(ZeroDivisionError), checkpointer.restore_in_stages() as stages:
            stages.model(model)
            raise ZeroDivisionError
        assert random.random() != expected


def test_a_run_without_a_checkpoint_and_stages_in_a_wrong_order(tmp_path: Path) -> None:
    model, optim = trained(0)
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages() as stages:
            assert stages.model(model) is None
            checkpointer.save(model, optim, 1)  # the first stage has decided
            assert stages.optimizers(optim) is None
            assert stages.restored is None
        with (
            checkpointer.restore_in_stages() as stages,
            pytest.raises(InvalidRequest, match="names of the model's parameters"),
        ):
            stages.optimizers(optim)


def test_a_shared_loader_also_puts_random_state_back_at_its_position(tmp_path: Path) -> None:
    batches: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    going = iter(batches)
    next(going)
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(None, None, 1, shared={"loader": batches})
        expected = [batch.tolist() for batch in going]
    loader: Any = ckpt.data.resumable(DataLoader(Samples(), batch_size=4, shuffle=True))
    with open_run(tmp_path) as checkpointer:
        with checkpointer.restore_in_stages() as stages:
            stages.extras(shared={"loader": loader})
        seed_all(9)
        assert [batch.tolist() for batch in loader] == expected
