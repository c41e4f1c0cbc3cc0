"""What a GPU of a machine or of a version of torch does not say; and that no wait for it is without limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from ckpt.device import Device, Patience
from ckptstore.errors import SaveFailed


@pytest.mark.parametrize("said", [{}, {"pci_domain_id": 0, "pci_bus_id": 300, "pci_device_id": 0}], ids=["2.6", "none"])
def test_a_numa_node_that_is_not_known(said: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torch before 2.8 has no PCI address."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="H100", major=9, **said))
    assert Device(torch.device("cuda", 0)).numa_node() is None


def test_memory_that_the_allocator_keeps_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its statistics say: loops reset the peak before a save, pools of CUDA graphs are kept."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (30 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 45 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 5 << 30)
    assert Device(torch.device("cuda", 0)).free_bytes() == 22 << 30


def test_patience_ends_a_wait() -> None:
    patience = Patience()
    patience.wait_until(lambda: True)
    patience.give_up_at = time.monotonic()
    waits: list[Callable[[], None]] = [lambda: patience.wait_until(lambda: False), patience.check]
    for wait in waits:
        with pytest.raises(SaveFailed, match="did not finish"):
            wait()
