from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.saver import pipeline
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.gates import Gate, gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No upload of writer="thread" begins while it is closed."""
    gate = Gate()
    monkeypatch.setattr(pipeline, "open_store", gated(gate))
    yield gate
    gate.open()


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    """Of a run on an empty store."""
    with open_run(tmp_path) as found:
        yield found
