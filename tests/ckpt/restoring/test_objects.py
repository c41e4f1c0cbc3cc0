"""Where restored tensors lie. The meta device stands for a GPU: its tensors are on another device than the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from ckpt import Checkpointer
from ckpt.restoring.destinations import Destinations
from ckptstore.format.documents import Content, Entries, Slices

EMPTY = Content(
    shards=[], entries=Entries([], [], []), slices=Slices(*[np.zeros(0, np.int64)] * 4), aliases={}, trees={}
)


def trained() -> tuple[nn.Module, AdamW]:
    model = nn.Linear(3, 3)
    optim = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3)).sum().backward()
    optim.step()
    return model, optim


def test_a_step_count_that_lies_elsewhere_is_replaced(tmp_path: Path) -> None:
    model, optim = trained()
    other, other_optim = trained()
    for state in other_optim.state.values():
        state["step"] = state["step"].to("meta")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, optim, 1)
        checkpointer.restore(other, other_optim)
    assert [state["step"].item() for state in other_optim.state.values()] == [1.0, 1.0]
    other_optim.step()


@pytest.mark.parametrize(("kind", "expected"), [("meta", "meta"), ("xpu", "cpu")])
def test_values_return_to_the_current_device(kind: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    tree = {"$": "tensor", "dtype": "float32", "shape": [1], "data": "AACAPw==", "device": kind}
    value = Destinations(EMPTY).decode(tree, "extra")
    assert value.device.type == expected
