"""Folders that Accelerate wrote. DeepSpeed's are in tests/frameworks, where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from ckpt import Checkpointer
from tests.support.command_line import invoke, succeed


def trained(seed: int) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    sched = torch.optim.lr_scheduler.StepLR(optim, 2)
    for _ in range(seed):
        model(torch.randn(4, 5)).sum().backward()
        optim.step()
        sched.step()
    return model, optim, sched


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_accelerate(tmp_path: Path, safe: bool) -> None:
    """The file of torch has the order of the parameters, and so the names of the optimizer's; safetensors have not."""
    accelerator = Accelerator(cpu=True)
    model, optim, sched = accelerator.prepare(*trained(3))
    accelerator.save_state(str(tmp_path / "folder"), safe_serialization=safe)
    done = succeed("import", tmp_path / "folder", "gpt@3", "--store", tmp_path / "store")
    assert ("by parameter number" in done.stderr) == safe
    fresh, fresh_optim, fresh_sched = trained(1)
    with Checkpointer(str(tmp_path / "store"), run="gpt") as checkpointer:
        if safe:
            restored = checkpointer.restore(fresh, scheduler=fresh_sched, optim_by_number=None)
            assert restored is not None
            fresh_optim.load_state_dict(restored.values["optim_by_number"])
        else:
            assert checkpointer.restore(fresh, fresh_optim, scheduler=fresh_sched)
    assert all(torch.equal(one, fresh.state_dict()[name]) for name, one in model.state_dict().items())
    assert fresh_sched.state_dict() == sched.state_dict()
    assert str(fresh_optim.state_dict()) == str(optim.state_dict())


def test_a_folder_without_its_ranks_files_is_damage(tmp_path: Path) -> None:
    torch.save({"module": {}, "param_shapes": []}, tmp_path / "mp_rank_00_model_states.pt")
    done = invoke("import", tmp_path, "gpt@3", "--store", tmp_path / "store")
    assert done.code
    assert "has not the files of all 1 ranks" in done.stderr
    (tmp_path / "layer_01-model_01-model_states.pt").touch()
    done = invoke("import", tmp_path, "gpt@3", "--store", tmp_path / "store")
    assert "is of tensor or pipeline parallelism" in done.stderr
