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
from ckpt.capture.modules import PARTS, check_reduced
from ckpt.capture.parameters import Pack, Parameters
from ckpt.capture.parts import FlatRange
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


def test_parts_of_masters_stand_for_parameters(checkpointer: Checkpointer) -> None:
    """As DeepSpeed has them: one flat master, and an optimizer that knows nothing else."""
    seed_all(1)
    model, plain = nn.Linear(3, 2, dtype=torch.bfloat16), nn.Linear(3, 2)
    flat = torch.randn(9).requires_grad_()  # the last element is padding
    known = Parameters()
    for parameter, (start, stop) in ((model.weight, (0, 6)), (model.bias, (6, 8))):
        part = known.parts[id(parameter)] = flat.detach()[start:stop]
        known.layouts[id(part)] = FlatRange(tuple(parameter.shape), 0, stop - start, (0,))
    views = {str(i): part for i, part in enumerate(known.parts.values())}
    known.packs.update(dict.fromkeys(map(id, (flat, *views.values())), Pack(flat, flat.detach(), views)))
    optim = torch.optim.AdamW([flat], lr=0.1)
    flat.grad = torch.randn(9)
    optim.step()
    setattr(model, PARTS, known)

    checkpointer.save(model, optim, 1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.5)
    checkpointer.restore(plain, other)
    moments = optim.state[flat]["exp_avg"]
    assert torch.equal(plain.weight.flatten(), flat[:6])
    assert torch.equal(plain.bias, flat[6:8])
    assert torch.equal(other.state[plain.bias]["exp_avg"], moments[6:8])
    assert other.param_groups[0]["lr"] == 0.1

    before = flat.detach().clone()
    with torch.no_grad():
        flat.zero_()
    optim.state.clear()
    checkpointer.restore(model, optim)
    assert torch.equal(flat[:8], before[:8])
    assert torch.equal(optim.state[flat]["exp_avg"][:8], moments[:8])


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
