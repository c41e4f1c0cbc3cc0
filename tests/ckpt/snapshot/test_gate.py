"""The gate: an optimizer waits for the copies of what it changes, and loses no overlap to the steps of another one."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from ckpt.snapshot.device_copies import SMALL_BYTES
from ckpt.snapshot.guard import CopyProgress, Guard, Part
from ckpt.snapshot.overlap import Gate, Overlap, PendingCopy
from ckpt.snapshot.stage import Transfer
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import held_copies, returns
from tests.ckpt.snapshot.simulated import DEFAULT, SIDE, SimulatedDevice, Training, one_schedule
from tests.ckpt.snapshot.simulated import open_run as open_device_run
from tests.support.training import same_state
from tests.support.waiting import present, wait_until

PATIENCE_S = 60


class Gan(nn.Module):
    """Two networks. An optimizer of each, which step by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(128, 128), nn.Linear(128, 128)
        self.optim = {
            "generator": AdamW(self.generator.parameters(), lr=0.01),
            "critic": SGD(self.critic.parameters(), lr=0.01, momentum=0.9),
        }

    def turn(self, name: str) -> None:
        self.critic(torch.tanh(self.generator(torch.randn(8, 128)))).square().mean().backward()
        self.optim[name].step()
        self.zero_grad()

    def state(self) -> Any:
        return copy.deepcopy((self.state_dict(), [optim.state_dict() for optim in self.optim.values()]))


@pytest.fixture
def deferred(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    found: list[set[str]] = []
    begin = Overlap.begin

    def record(overlap: Overlap, pending: PendingCopy) -> None:
        assert isinstance(pending.transfer, Transfer)
        found.append({piece.entry for piece in pending.transfer.later.slices})
        begin(overlap, pending)

    monkeypatch.setattr(Overlap, "begin", record)
    return found


@contextmanager
def held_leaves(held: Callable[[str], bool]) -> Iterator[threading.Event]:
    """The copier begins when an optimizer waits, and stops at these entries of host memory until the event is set."""
    released, copy_leaf, pick = threading.Event(), Transfer._copy_leaf, CopyProgress.next

    def copy_when_released(transfer: Transfer, index: int, guard: Guard) -> None:
        if held(transfer.later.slices[index].entry):
            assert released.wait(PATIENCE_S)
        copy_leaf(transfer, index, guard)

    def pick_when_wanted(progress: CopyProgress, left: Mapping[Part, Any]) -> Part:
        wait_until(lambda: progress._wanted or released.is_set(), "an optimizer to wait", PATIENCE_S)
        return pick(progress, left)

    with patch.object(Transfer, "_copy_leaf", copy_when_released), patch.object(CopyProgress, "next", pick_when_wanted):
        try:
            yield released
        finally:
            released.set()


def with_gradients(optim: Optimizer) -> Optimizer:
    for group in optim.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    return optim


def test_optimizers_that_step_by_turns_keep_overlap(tmp_path: Path, deferred: list[set[str]]) -> None:
    gan, states = Gan(), []
    with open_run(tmp_path) as checkpointer:
        checkpointer.prepare(gan, gan.optim)
        for name in gan.optim:
            gan.turn(name)
        for step, name in enumerate(["critic", "critic", "generator", "critic", "critic", "generator"]):
            states.append(gan.state())
            checkpointer.save_async(gan, gan.optim, step)
            weights = {"model/generator.weight", "model/critic.weight"}
            assert weights | {"optim.critic/state/critic.weight/momentum_buffer"} <= deferred[-1]
            gan.turn(name)
        checkpointer.wait()
        for step, state in enumerate(states):
            other = Gan()
            checkpointer.restore(other, other.optim, checkpoint=step)
            assert same_state(other.state(), state), step


def test_an_optimizer_waits_for_what_it_changes_which_is_copied_first(tmp_path: Path) -> None:
    gan = Gan()
    with open_run(tmp_path) as checkpointer, held_leaves(lambda entry: "generator" in entry) as released:
        checkpointer.prepare(gan, gan.optim)
        for name in gan.optim:
            gan.turn(name)
        state, handle = gan.state(), checkpointer.save_async(gan, gan.optim, 1)
        assert returns(lambda: gan.turn("critic"))(PATIENCE_S)
        assert not handle.staged()
        stepped = returns(lambda: gan.turn("generator"))
        assert not stepped(0.2)
        released.set()
        assert stepped(PATIENCE_S)
        handle.result(PATIENCE_S)
        other = Gan()
        checkpointer.restore(other, other.optim, checkpoint=1)
        assert same_state(other.state(), state)


@pytest.mark.parametrize("kind", ["unknown", "one that shares memory", "one whose partner calls no hook"])
def test_an_optimizer_that_may_change_more_waits_for_more(tmp_path: Path, kind: str, deferred: list[set[str]]) -> None:
    class Silent(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    Silent.step.hooked = True  # type: ignore[attr-defined]  # so that torch does not wrap it
    model = nn.ParameterList([torch.ones(1 << 14) for _ in range(3)])
    model.append(nn.Parameter(model[0].data[: 1 << 13]))  # in the memory of the first
    first = (Silent if "partner" in kind else SGD)([model[0]], lr=0.1)
    second, unknown = SGD([model[1], model[3]], lr=0.1), SGD([torch.ones(1)], lr=0.1)
    third = SGD([model[2]], lr=0.1)
    stepping = {"unknown": unknown, "one that shares memory": second}.get(kind, third)
    with open_run(tmp_path) as checkpointer, held_leaves(lambda entry: entry == "model/0") as released:
        checkpointer.prepare(model, [first, second, third])
        for one in (first, second, third):
            with_gradients(one).step()
        handle = checkpointer.save_async(model, [first, second, third], 1)
        assert "model/0" in deferred[-1]
        stepped = returns(with_gradients(stepping).step)
        assert not stepped(0.2)
        released.set()
        assert stepped(PATIENCE_S)
        handle.result(PATIENCE_S)


def test_only_a_replayed_optimizer_loses_overlap(
    training: Training, tmp_path: Path, deferred: list[set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """What it changes is gathered on the device. Replays begin right after the call; they do not wait for the host."""
    with caplog.at_level(logging.INFO, "ckpt"), training.run(tmp_path, captured=True, slots=2) as checkpointer:
        for step in range(5):
            before = training.device.gathered_bytes
            training.save(checkpointer, step)
            entries = {"model/w0", "model/w1", "optim.first/state/w0/momentum", "optim.first/state/w1/momentum"}
            assert deferred[-1] == entries
            assert step == 0 or training.device.gathered_bytes - before >= 2 * SMALL_BYTES
            training.step(training.device.random.choice([DEFAULT, "other"]))
    (said,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "in GPU memory first" in said


def test_optimizers_of_a_device_step_by_turns(training: Training, tmp_path: Path, deferred: list[set[str]]) -> None:
    """On two streams, of which each waits for its own copies."""
    with training.run(tmp_path) as checkpointer:
        for step in range(8):
            training.save(checkpointer, step)
            assert len(deferred[-1]) == 8
            training.turn(training.device.random.choice(["first", "second"]))


@one_schedule
def test_a_stream_waits_only_for_the_copies_of_its_optimizer(training: Training, tmp_path: Path) -> None:
    waited: list[Any] = []
    wait = SimulatedDevice.wait

    def counted(device: SimulatedDevice, mark: Any, side: bool) -> None:
        if not side:
            waited.append(mark)
        wait(device, mark, side)

    with training.run(tmp_path) as checkpointer:
        training.device.synchronize()
        with training.device.paused(SIDE):  # from before the save: a copy that is complete is not waited for
            training.save(checkpointer, 1)
            with patch.object(SimulatedDevice, "wait", counted):
                for optim, waits in ((training.second, 1), (training.second, 1), (training.first, 2)):
                    optim.step()
                    assert len(waited) == waits  # once
            assert waited[0] is not waited[1]


def test_a_stream_waits_for_what_is_copied_in_the_order_of_another_one(training: Training, tmp_path: Path) -> None:
    """A first save overlaps with nothing. The next step is on a stream that knows nothing of that of the call."""
    training.device.synchronize()
    with open_device_run(tmp_path) as checkpointer:
        released = training.device.hang()
        training.save(checkpointer, 1)
        with training.device.stream("other"):
            for optim in training.optim.values():
                optim.step()
        for _ in range(50):
            training.device.progress()
        released.set()
        checkpointer.wait()
        training.check(checkpointer)


def test_a_step_that_was_captured_before_the_checkpointer_existed_is_not_hooked() -> None:
    captured = SGD([torch.ones(1)], lr=0.1)
    Gate().come(captured, capturing=True)
    gate = Gate()
    gate.come(captured, capturing=False)
    gate.expect([captured])
    assert not gate.hooked


def test_a_capturable_optimizer_is_hooked_if_it_came_since_the_last_save() -> None:
    """It may be in a graph that was captured before anything could see it."""
    capturable = AdamW([torch.ones(1)], lr=0.1, capturable=True)
    gate, hooked = Gate(), []
    for comes in (False, True, False, True):
        if comes:
            gate.come(capturable, capturing=False)
        gate.expect([capturable])
        hooked.append(bool(gate.hooked))
        gate.saved()
    assert hooked == [False, True, False, True]


class Averaging(SGD):
    """Changes its parameters also in a method of its own, as schedule-free optimizers do."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(1)


def test_a_method_that_a_class_adds_to_optimizer_waits_as_its_step_does(tmp_path: Path) -> None:
    model = nn.Linear(128, 128)
    optim = Averaging(model.parameters(), lr=0.1)
    with open_run(tmp_path) as run:
        run.save(model, optim, 1)
        with held_copies() as brake:
            before = copy.deepcopy(model.state_dict())
            handle = run.save_async(model, optim, 2)
            assert run._saves.overlap is not None
            pending = present(run._saves.overlap._pending)
            exchanged = returns(optim.eval)
            wait_until(pending.patience.wanted.is_set)
            brake.released.set()
            assert exchanged(PATIENCE_S)
            handle.result(PATIENCE_S)
        assert same_state(run.load(2, "model/*"), {f"model/{name}": value for name, value in before.items()})
        assert not torch.equal(model.weight, before["weight"])
