"""Snapshots of a simulated device, whose operations execute late and out of order: each is the state of its call."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ckpt.device import DEVICES
from ckpt.host.segment import Segment
from ckpt.snapshot import device_copies, overlap
from ckpt.snapshot.arena import Arena
from ckpt.snapshot.device_copies import SMALL_BYTES, pin_segment
from ckptstore.errors import CkptError, InvalidRequest, SaveFailed, SnapshotTorn
from tests.ckpt.snapshot.overlapping import returns
from tests.ckpt.snapshot.simulated import (
    DEFAULT,
    LARGE,
    SIDE,
    SimulatedDevice,
    SimulatedSGD,
    Training,
    add_one,
    one_schedule,
    open_run,
    plugged_in,
)
from tests.ckpt.snapshot.test_arena import Announced
from tests.support.waiting import present, wait_until

PATIENCE_S = 60


def test_optimizers_on_two_streams_a_graph_and_memory_that_is_freed(training: Training, tmp_path: Path) -> None:
    chance = training.device.random
    with training.run(tmp_path, slots=2) as checkpointer:
        graph_from = chance.randint(1, 9)
        for step in range(8):
            training.step(chance.choice([DEFAULT, "other"]))
            if step == graph_from:
                checkpointer.wait()
                training.capture()
            training.save(checkpointer, step)
            if chance.random() < 0.5:
                training.replace_average()
        training.step("other")


def test_a_copy_that_fails_leaves_its_slot_alone_until_the_device_is_done(training: Training, tmp_path: Path) -> None:
    with training.run(tmp_path, slots=1) as checkpointer:
        for step in range(0, 6, 2):
            training.step()
            training.device.fails_after = training.device.random.randint(1, 4)
            with pytest.raises(CkptError):
                checkpointer.save_async(training.model, training.optim, step).result(PATIENCE_S)
            training.device.fails_after = None
            training.save(checkpointer, step + 1).result(PATIENCE_S)


@one_schedule
def test_the_first_save_launches_nothing_that_prepare_has_not(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver loads a kernel at its first launch, and waits for the whole device then."""
    launched = set[str]()

    def noting(name: str) -> Callable[..., Any]:
        call = getattr(SimulatedDevice, name)

        def launch(*args: Any, **kwargs: Any) -> Any:
            launched.add(name)
            return call(*args, **kwargs)

        return launch

    for name in ("copy", "gather", "read", "digest"):
        monkeypatch.setattr(SimulatedDevice, name, noting(name))
    with training.run(tmp_path) as checkpointer:
        prepared = set(launched)
        launched.clear()
        training.save(checkpointer, 1).result(PATIENCE_S)
    assert launched == prepared == {"copy", "gather", "read", "digest"}


def test_unpinnable_memory_goes_through_a_ring(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training.device.refuses_pins = True
    with training.run(tmp_path) as checkpointer:
        for step in range(4):
            training.step()
            training.save(checkpointer, step)
    assert "cannot be pinned" in caplog.text


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 3, 1, 2)], ids=["transposed", "channels last"])
def test_the_ring_reads_in_the_order_of_the_stream(order: tuple[int, ...], tmp_path: Path) -> None:
    """The device is behind: memory whose elements are not in order is read when the state of the call is complete."""
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        simulated.refuses_pins = True
        model = nn.ParameterList([simulated.tensor(0.0, 16 * LARGE).view(16, 8, -1, 2).permute(order)])
        optim = SimulatedSGD(simulated, list(model))
        checkpointer.prepare(model, optim)
        optim.step()
        for step in range(3):
            simulated.synchronize()
            released = simulated.hang()
            optim.step()
            handle = checkpointer.save_async(model, optim, step)
            stepped = returns(optim.step)
            wait_until(lambda: simulated.queued(SIDE) > 1, "the copier to queue a copy", PATIENCE_S)
            released.set()
            assert stepped(PATIENCE_S)
            handle.result(PATIENCE_S)
            assert checkpointer.load(step)["model/0"].unique().tolist() == [2.0 * (step + 1)]
        simulated.synchronize()


def test_all_slots_are_pinned_before_training_begins() -> None:
    with plugged_in(0) as simulated:
        slots = Arena(2, Announced())
        slots.expect(1 << 20, torch.device("cpu"), wait=True)
        assert simulated.registered == {addressof(segment.map) for segment in slots.segments.values()}
        assert len(slots.segments) == 2
        slots.close()


MB = 1 << 20


@pytest.mark.parametrize(
    ("limit", "crosses", "pinned"),
    [(20 * MB, True, [0, 16 * MB, 32 * MB]), (1 << 40, False, [0]), (20 * MB, False, [])],
    ids=["in pieces", "whole", "not at all"],
)
def test_a_slot_is_pinned_whole_or_in_pieces_that_copies_may_cross(
    limit: int, crosses: bool, pinned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """limit: of the bytes that are pinned at once. Pieces of 16 MiB, in which memory is not touched."""
    if not crosses:
        monkeypatch.setattr(device_copies, "PIN_BYTES", 16 * MB)
    with plugged_in(0) as simulated:
        pin, simulated.crosses_borders = simulated.pin, crosses
        monkeypatch.setattr(simulated, "pin", lambda at, size: pin(at, size) if size <= limit else 2)
        segment = Segment(40 * MB)
        assert pin_segment(segment, DEVICES["cpu"](torch.device("cpu"))) == bool(pinned)
        assert simulated.registered == {addressof(segment.map) + at for at in pinned}
        segment.close()


class OwnStream(SimulatedSGD):
    """Steps on a stream of its own, which may wait for the current one."""

    waits = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        hooked = self._device.record(DEFAULT)
        with self._device.stream("own"):
            if self.waits:
                self._device.wait(hooked, side=False)
            for parameter in self.param_groups[0]["params"]:  # super().step() may call the hook on this stream
                self._device.launch(add_one(parameter))


@pytest.mark.parametrize("waits", [True, False])
def test_an_optimizer_on_a_stream_of_its_own_waits_for_the_current_one(waits: bool, tmp_path: Path) -> None:
    """The gate orders the current stream after the copy. One that does not wait for it is found by the samples."""
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        model = nn.ParameterList([simulated.tensor(1.0, LARGE)])
        optim = OwnStream(simulated, list(model))
        checkpointer.prepare(model, optim)
        optim.step()
        simulated.synchronize()
        optim.waits = waits
        with simulated.paused(SIDE):
            handle = checkpointer.save_async(model, optim, 1)
            wait_until(lambda: simulated.queued(SIDE) > 1, "the copier to queue a copy", PATIENCE_S)
            while simulated.queued(DEFAULT):  # the samples of the call are read
                simulated.progress()
            optim.step()
            for _ in range(100):
                simulated.progress()
        if waits:
            handle.result(PATIENCE_S)
            assert checkpointer.load(1)["model/0"].unique().tolist() == [2.0]
        else:
            with pytest.raises(SnapshotTorn, match="model/0"):
                handle.result(PATIENCE_S)
        simulated.synchronize()


@one_schedule
def test_a_capture_while_a_snapshot_is_copied_is_refused(training: Training, tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        released = training.device.hang()
        training.save(checkpointer, 1)
        with pytest.raises(InvalidRequest, match=r"wait\(\)"):
            training.capture()
        released.set()
        checkpointer.wait()
        training.capture()
        training.check(checkpointer)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "through a ring"])
def test_waits_for_a_device_that_is_stuck_are_bounded(pinned: bool, tmp_path: Path) -> None:
    """Its queue would be full: launches behind a collective whose other rank is lost would block."""
    with plugged_in(0) as simulated:
        simulated.refuses_pins = not pinned
        model = nn.ParameterList(simulated.tensor(1.0, LARGE) for _ in range(300))
        optim = SimulatedSGD(simulated, list(model))
        checkpointer = open_run(tmp_path)
        checkpointer.prepare(model, optim)
        optim.step()
        simulated.synchronize()
        released, simulated.queue_size = simulated.hang(), 1024
        handle = checkpointer.save_async(model, optim, 1)
        with pytest.raises(TimeoutError, match="step 1"):
            checkpointer.wait(0.2)
        assert not handle.done()
        with pytest.raises(SaveFailed, match="did not finish"):
            checkpointer.close(0.3)
        assert handle.exception() is not None
        released.set()
        simulated.synchronize()


@one_schedule
def test_close_does_not_wait_for_a_launch_that_blocks(
    training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other work of the process may have filled the queue of the driver."""
    monkeypatch.setattr(overlap, "_BLOCKED_S", 0.1)
    checkpointer, device = open_run(tmp_path), training.device
    checkpointer.prepare(training.model, training.optim)
    training.step()
    device.synchronize()
    released, device.queue_size = device.hang(SIDE), 1
    handle = training.save(checkpointer, 1)
    with pytest.raises(SaveFailed, match="did not finish"):
        checkpointer.close(0.1)
    assert isinstance(handle.exception(), SaveFailed)
    released.set()
    device.queue_size = 1 << 40
    device.synchronize()
    with suppress(CkptError):
        checkpointer.close()


@one_schedule
def test_copies_are_not_queued_behind_a_backlog_until_an_optimizer_steps(training: Training, tmp_path: Path) -> None:
    device = training.device
    with training.run(tmp_path) as checkpointer:
        device.synchronize()
        released, polls = device.hang(), device.polls
        handle = training.save(checkpointer, 1)
        wait_until(lambda: device.polls > polls + 3, "the copier to wait for the device", PATIENCE_S)
        assert not device.queued(SIDE)
        training.step()  # returns though the device is stuck
        assert device.queued(SIDE)
        assert not handle.staged()
        released.set()
        handle.result(PATIENCE_S)


def test_a_change_that_moves_no_counter_is_found(training: Training, tmp_path: Path) -> None:
    """A kernel that is no optimizer's writes to a parameter after the call: the first overlapped saves find it."""
    with training.run(tmp_path) as checkpointer:
        handle = training.save(checkpointer, 1)
        training.device.launch(add_one(training.model.get_parameter("w1")))
        with suppress(SnapshotTorn):
            handle.result(PATIENCE_S)
        if isinstance(handle.exception(), SnapshotTorn):
            assert "model/w1" in str(handle.exception())
            del training.saved[1]


@one_schedule
def test_slots_are_unpinned_before_they_are_unmapped(training: Training, tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        training.save(checkpointer, 1).result(PATIENCE_S)
        training.device.synchronize()
        assert training.device.registered
    del checkpointer

    def unpinned() -> bool:
        gc.collect()  # a closed Checkpointer is part of a cycle
        return not training.device.registered

    wait_until(unpinned, "the slots to be unpinned", PATIENCE_S)


FEW = 40
"""Copies of a save with many small leaves: parts, types, samples and digests."""


def test_many_small_leaves_are_few_copies(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        model = nn.ParameterList(torch.randn(1 + i % 7, 3).to(dtypes[i % 3]) for i in range(150))
        model.register_buffer("late", torch.randn(SMALL_BYTES))
        for i in range(150):
            model.register_buffer(f"buffer{i}", torch.randn(i % 5, 2).t())
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        checkpointer.prepare(model, optim)
        optim.step()
        for step in range(4):
            before = simulated.copies
            checkpointer.save_async(model, optim, step).result(PATIENCE_S)
            assert simulated.copies - before < FEW
        found = checkpointer.load(3)
        assert found.keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
        simulated.synchronize()


@pytest.mark.parametrize("refusal", ["known", "on allocation", "unknown"])
def test_without_memory_on_the_device_it_is_copied_in_order(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "ckpt"), training.run(tmp_path, captured=True) as checkpointer:
        training.device.limit_bytes = SMALL_BYTES
        if refusal == "on allocation":
            monkeypatch.setattr(training.device, "free_bytes", iter([1 << 40, 0] * 100).__next__)
        if refusal == "unknown":  # the allocator is not torch's
            monkeypatch.setattr(training.device, "free_bytes", Mock(side_effect=RuntimeError("does not support")))
        for step in range(4):
            training.save(checkpointer, step)
            training.step("other")
    (said,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert "a copy does not fit" in said


def test_a_single_small_leaf_beside_large_ones_is_copied_with_them(tmp_path: Path) -> None:
    """It is the first one: its group is not one of small leaves that lie together."""
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        model = nn.Module()
        for name, size in (("bias", 8), ("weight", SMALL_BYTES), ("wider", 2 * SMALL_BYTES)):
            model.register_buffer(name, torch.zeros(size))
        optim = torch.optim.SGD(nn.Linear(1, 1).parameters())
        for step in range(4):
            for tensor in model.buffers():
                simulated.launch(add_one(tensor))
            checkpointer.save_async(model, optim, step)
        checkpointer.wait()
        for step in range(4):
            found = checkpointer.load(step)
            assert {name: set(tensor.tolist()) for name, tensor in found.items() if name.startswith("model/")} == {
                f"model/{name}": {step + 1.0} for name in ("bias", "weight", "wider")
            }, step
        simulated.synchronize()


@one_schedule
def test_the_first_save_does_not_guess_how_much_memory_training_needs(training: Training, tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpointer:
        training.save(checkpointer, 0)
        assert training.device.gathered_bytes < SMALL_BYTES
        training.step()
        checkpointer.wait()
        training.check(checkpointer)


@one_schedule
def test_training_continues_beside_copies_of_what_was_gathered(training: Training, tmp_path: Path) -> None:
    """The side stream is stuck; replays on the device are not."""
    with training.run(tmp_path, captured=True) as checkpointer:
        training.save(checkpointer, 0).result(PATIENCE_S)
        handle = training.save(checkpointer, 1)
        with training.device.paused(SIDE):
            for kernel in present(training.graph):
                training.device.launch(kernel)
            replayed = training.device.record(DEFAULT)
            wait_until(replayed.done, "the graph to be replayed", PATIENCE_S)
            assert not handle.staged()
