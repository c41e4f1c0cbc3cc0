from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckpt.snapshot import writers
from tests.ckpt.snapshot.gates import Gate, gated


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """No upload of writer="thread" begins while it is closed."""
    gate = Gate()
    monkeypatch.setattr(writers, "open_store", gated(gate))
    yield gate
    gate.open()
