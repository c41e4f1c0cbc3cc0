from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt import Checkpointer
from ckpt.capture.train_state import TrainState
from tests.support.training import Net, same_state, seed_all


def test_compiled_and_plain_models_share_checkpoints(tmp_path: Path) -> None:
    seed_all(3)
    net = Net()
    compiled: Any = torch.compile(net, backend="eager")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
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
