"""Restores to a device: through a few buffers, by copies that end late, and none is filled before it is empty."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.device import Mark
from ckpt.restoring.gpu_copy import BufferPool
from ckptstore.errors import RestoreFailed
from tests.ckpt.restoring.receiving import ReceivingDevice, check_slices, receiving
from tests.support.checkpoints import flip
from tests.support.training import same_state

_PATIENCE_S = 30


class Odd(nn.Module):
    """Tensors that do not lie in order, of several types, tied, empty, without dimensions, and many that are small."""

    steps: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Linear(192, 193)
        self.across = nn.Linear(192, 160)
        self.across.weight.data = self.across.weight.data.t().contiguous().t()
        self.image: Any = nn.Conv2d(32, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.tied = nn.Linear(192, 193)
        self.tied.weight = self.plain.weight
        self.small = nn.ParameterList(nn.Parameter(torch.randn(count)) for count in range(1, 40))
        self.weights16 = nn.Parameter(torch.randn(300, 70).bfloat16())
        self.spectrum = nn.Parameter(torch.randn(90, 50, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0, 3))


def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = Odd(seed)
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.step()
    return model, optim


@pytest.fixture(scope="module", params=["off", "fast"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    store = str(tmp_path_factory.mktemp(request.param))
    with Checkpointer(store, run="r", writer="thread", compress=request.param, max_references=0) as checkpointer:
        checkpointer.save(*make(1), 1)
        model, optim = make(2)
        checkpointer.save(model, optim, 2)
    return store, (model.state_dict(), optim.state_dict())


def restore(store: str, seed: int = 0) -> tuple[Any, Any]:
    model, optim = make(seed)
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.restore(model, optim)
    return model.state_dict(), optim.state_dict()


def test_all_bits_arrive_through_a_few_small_buffers(saved: tuple[str, Any]) -> None:
    store, state = saved
    with receiving() as device:
        assert same_state(restore(store), state)
    assert device.ends == 1
    largest = max(parameter.nbytes for parameter in Odd(0).parameters())
    assert 1 <= len(device.staged) <= 3
    assert max(device.staged) < 2 * largest


def test_types_are_cast_and_what_differs_in_shape_is_left_alone(saved: tuple[str, Any]) -> None:
    store, (weights, _) = saved
    model = Odd(0).double()
    model.small = nn.ParameterList(nn.Parameter(torch.full((50,), 7.0)) for _ in range(39))
    with receiving(), Checkpointer(store, run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model, None, strict=False) is not None
    found = model.state_dict()
    for name, value in weights.items():
        if name.startswith("small"):
            assert found[name].eq(7).all()
        else:
            assert torch.equal(found[name], value.to(found[name].dtype)), name


def test_slices_arrive_wherever_they_live(saved: tuple[str, Any]) -> None:
    store, (weights, _) = saved
    with receiving():
        check_slices(store, 2, "across.weight", weights["across.weight"])


def test_a_damaged_checkpoint_gives_way_to_the_one_before(saved: tuple[str, Any], tmp_path: Path) -> None:
    shutil.copytree(saved[0], tmp_path, dirs_exist_ok=True)
    flip(next(tmp_path.rglob("000001-000000000002-*/*.ckpt")))
    first, optim = make(1)
    with receiving() as device:
        assert same_state(restore(str(tmp_path)), (first.state_dict(), optim.state_dict()))
    assert device.ends == 2


class BrokenDevice(ReceivingDevice):
    def run(self, work: Callable[[], object]) -> None:
        def fail() -> None:
            raise RuntimeError("an illegal access")

        super().run(fail)


def test_a_device_that_fails_fails_the_restore(saved: tuple[str, Any]) -> None:
    with receiving(BrokenDevice), pytest.raises(RestoreFailed, match="illegal access"):
        restore(saved[0])


class Flag(Mark):
    """A mark that is passed when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self._passed = threading.Event()
        self._error = error
        self.asked = threading.Event()

    def done(self) -> bool:
        self.asked.set()
        if self._passed.is_set() and self._error is not None:
            raise self._error
        return self._passed.is_set()

    def go(self) -> None:
        self._passed.set()


def ring_of(count: int) -> BufferPool:
    numbers = iter(range(100))
    return BufferPool(count, lambda: next(numbers))


def test_who_finds_all_in_use_waits_for_the_one_given_first_and_all_its_marks() -> None:
    ring, flags = ring_of(2), [Flag(), Flag(), Flag()]
    assert [ring.take(), ring.take()] == [0, 1]
    ring.give(1, flags[:2])
    ring.give(0, flags[2:])
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(ring.take)
        assert flags[0].asked.wait(_PATIENCE_S)
        flags[0].go()
        assert flags[1].asked.wait(_PATIENCE_S)
        assert not taking.done()
        flags[1].go()
        assert taking.result(_PATIENCE_S) == 1
    assert not flags[2].asked.is_set()


def test_a_failure_to_empty_or_to_make_one_leaves_no_thread_waiting() -> None:
    flag = Flag(OSError("the device is gone"))
    made: Iterator[int | Exception] = iter([0, OSError("no memory"), 2])

    def make() -> int:
        found = next(made)
        if isinstance(found, Exception):
            raise found
        return found

    ring = BufferPool(1, make)
    ring.give(ring.take(), [flag])
    flag.go()
    with pytest.raises(OSError, match="device is gone"):
        ring.take()
    with pytest.raises(OSError, match="no memory"):
        ring.take()
    assert ring.take() == 2


def test_drained_means_all_are_empty() -> None:
    ring, flags = ring_of(2), [Flag(), Flag()]
    for number, flag in zip([ring.take(), ring.take()], flags, strict=True):
        ring.give(number, [flag])
    with ThreadPoolExecutor(1) as pool:
        draining = pool.submit(ring.drain)
        flags[0].go()
        assert flags[1].asked.wait(_PATIENCE_S)
        assert not draining.done()
        flags[1].go()
        draining.result(_PATIENCE_S)
    failed = Flag(OSError("the device is gone"))
    failed.go()
    ring = ring_of(1)
    ring.give(ring.take(), [failed])
    with pytest.raises(OSError, match="device is gone"):
        ring.drain()
