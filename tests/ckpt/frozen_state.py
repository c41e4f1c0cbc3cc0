"""The training state in tests/data/format-1-training, by step: computed from seeds, the same on every machine.

Run `training` was saved at steps 1, 2 and 3 by the code before folders, classes and options got the names they have
now. Only `trained`, its half precision copy and the optimizer change; the other entries are stored once, with step 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

RUN, OTHER_RUN = "training", "other"
_FROZEN, _TRAINED = (48, 64), (16, 32)


def _tensor(value: object) -> Tensor:
    assert isinstance(value, Tensor)
    return value


class Net(nn.Module):
    """A frozen weight, a trained one under two names, and a copy of it in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(_FROZEN, dtype=torch.float16), requires_grad=False)
        self.trained = nn.Parameter(torch.zeros(_TRAINED))
        self.tied = self.trained
        self.register_buffer("cast", torch.zeros(_TRAINED, dtype=torch.bfloat16))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))


def numbers(seed: int, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [0, 1) with 24 bits, by integer arithmetic only."""
    index = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    mixed = (index * np.uint64(2_654_435_761) + np.uint64(seed * 40_503 + 1)) * np.uint64(6_364_136_223_846_793_005)
    bits = (mixed >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
    return torch.from_numpy(bits.reshape(shape))


def state(step: int) -> tuple[Net, torch.optim.Adam, dict[str, Any]]:
    """Model, optimizer and extras as they were saved at a step; 0: as before the first step."""
    net = Net()
    optim = torch.optim.Adam([net.trained], lr=0.001 * (step + 1))
    extras: dict[str, Any] = {"data": Position()}
    if step:
        net.trained.grad = torch.zeros(_TRAINED)
        optim.step()
        moments = optim.state[net.trained]
        with torch.no_grad():
            net.frozen.copy_(numbers(1, _FROZEN))
            net.trained.copy_(numbers(10 * step, _TRAINED))
            _tensor(net.cast).copy_(net.trained)
            _tensor(net.counter).fill_(step)
            for number, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
                _tensor(moments[name]).copy_(numbers(10 * step + number, _TRAINED))
            _tensor(moments["step"]).fill_(float(step))
        extras["data"].value = {"epoch": step, "seen": [1 << 70, float("inf")], "key": b"\0\xff", "pair": (step, None)}
    return net, optim, extras


class Position:
    """An extra with a state dict of its own."""

    def __init__(self) -> None:
        self.value: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state
