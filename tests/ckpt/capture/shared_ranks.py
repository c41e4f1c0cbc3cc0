"""Shared state in real ranks: a scenario for tests.support.parallel.runner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckpt import Checkpointer


def save_and_restore(store: str) -> list[float]:
    """What this rank gets back."""
    model = nn.Linear(2, 2)
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.save(model, None, 1, shared={"seen": {"w": torch.arange(2.0)}})
        restored = checkpointer.restore(model, shared={"seen": None})
    assert restored is not None
    found: Any = restored.values["seen"]["w"].tolist()
    return list(found)
