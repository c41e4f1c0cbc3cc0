from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.rng import load_rng_state, rng_state
from tests.support.training import seed_all
from tests.support.waiting import present


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[torch.Generator]:
    """Three devices; the second one is current."""
    generators = [torch.Generator() for _ in range(3)]
    answers: dict[str, Callable[[], object]] = {
        "is_available": lambda: True, "is_initialized": lambda: True, "init": lambda: None,
        "current_device": lambda: 1,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "default_generators", tuple(generators))
    return generators


def drawn(generators: list[torch.Generator]) -> list[float]:
    return [torch.rand(1, generator=generator).item() for generator in generators]


def test_generators_of_all_devices_are_restored(devices: list[torch.Generator], checkpointer: Checkpointer) -> None:
    for seed, generator in enumerate(devices):
        generator.manual_seed(seed)
    model = nn.Linear(2, 2)
    checkpointer.save(model, None, 1)
    expected = drawn(devices)
    drawn(devices)
    checkpointer.restore(model)
    assert drawn(devices) == expected


def test_the_current_device_gets_its_state(devices: list[torch.Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    saved, expected = rng_state(), drawn(devices)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    load_rng_state(saved)
    assert drawn(devices)[0] == expected[1]


def test_a_state_of_an_older_version_sets_the_current_device(devices: list[torch.Generator]) -> None:
    saved = rng_state()
    del saved["cuda_devices"]
    expected, after = drawn(devices), [generator.get_state() for generator in devices]
    load_rng_state(saved)
    assert drawn(devices[1:2]) == expected[1:2]
    assert torch.equal(devices[0].get_state(), after[0])


def test_random_state_is_put_back_when_it_is_asked_for(checkpointer: Checkpointer) -> None:
    model = nn.Linear(2, 2)
    seed_all(1)
    checkpointer.save(model, None, 1)
    expected = drawn_globally()
    seed_all(2)
    untouched = drawn_globally()
    seed_all(2)
    restored = present(checkpointer.restore(model, rng=False))
    assert drawn_globally() == untouched
    for _ in range(2):
        restored.restore_rng()
        assert drawn_globally() == expected
    checkpointer.restore(model)
    assert drawn_globally() == expected


def drawn_globally() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]
