from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt import Checkpointer
from ckpt.capture import modules
from ckpt.capture.modules import check_reduced
from ckpt.capture.train_state import TrainState
from ckptstore.errors import UnsupportedObject
from tests.support.training import Net, same_state, seed_all


def test_compiled_and_plain_models_share_checkpoints(checkpointer: Checkpointer) -> None:
    seed_all(3)
    net = Net()
    compiled: Any = torch.compile(net, backend="eager")
    checkpointer.save(compiled, None, 0)
    plain = Net()
    checkpointer.restore(plain)
    assert same_state(plain.state_dict(), net.state_dict())
    other: Any = torch.compile(Net(), backend="eager")
    checkpointer.restore(other)
    assert same_state(other._orig_mod.state_dict(), net.state_dict())


def test_names_do_not_depend_on_wrappers() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2))
    norm: Any = torch.compile(nn.BatchNorm1d(2), backend="eager")
    wrapped: Any = torch.compile(nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.ReLU(), norm), backend="eager")
    for model in (plain, wrapped, nn.DataParallel(plain), nn.DataParallel(wrapped)):
        found = [leaf.name for leaf in TrainState.of(model, None, {}).leaves("model")]
        assert found == list(plain.state_dict())


@pytest.mark.parametrize("held", [None, "accumulated", "unsharded"])
@pytest.mark.parametrize("version", ["2.6", "2.13"])
def test_gradients_that_are_not_reduced_are_found_in_every_torch(
    version: str, held: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.6 has one group of parameters, or none: the module has no parameters of its own."""
    grad = torch.ones(1)
    parameter = SimpleNamespace(
        unsharded_accumulated_grad=grad if held == "accumulated" else None,
        _unsharded_param=SimpleNamespace(grad=grad if held == "unsharded" else None),
    )
    group = SimpleNamespace(fsdp_params=[parameter])

    class Sharded(nn.Module):
        def __init__(self, group: object) -> None:
            super().__init__()
            self.group = group

        def _get_fsdp_state(self) -> object:
            if version == "2.6":
                return SimpleNamespace(_fsdp_param_group=self.group)
            return SimpleNamespace(_fsdp_param_groups=[self.group] if self.group else [], _fsdp_param_group=None)

    monkeypatch.setattr(modules, "FSDPModule", Sharded)
    check_reduced([Sharded(None)])
    with nullcontext() if held is None else pytest.raises(UnsupportedObject, match="not reduced"):
        check_reduced([nn.Sequential(Sharded(None), Sharded(group))])
