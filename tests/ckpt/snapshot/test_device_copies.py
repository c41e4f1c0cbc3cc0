"""Snapshots of a simulated device, whose operations execute late and out of order: each is the state of its call."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from ctypes import addressof
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.device import DEVICES
from ckpt.host.segment import Segment
from ckpt.snapshot import device_copies, overlap
from ckpt.snapshot.arena import Arena
from ckpt.snapshot.device_copies import SMALL_BYTES, by_size, pin_segment
from ckptstore.errors import CkptError, InvalidRequest, SaveFailed, SnapshotTorn
from tests.ckpt.snapshot.simulated import DEFAULT, SIDE, SimulatedDevice, SimulatedSGD, add_one, plugged_in
from tests.ckpt.snapshot.test_arena import Announced
from tests.support.waiting import wait_until

PATIENCE_S = 60
LARGE = SMALL_BYTES // 4 + 512
"""Elements of a tensor that is not gathered with others."""
SCHEDULES = range(max(4, int(os.environ.get("CKPTD_SCHEDULES", 0))))


class Training:
    """Two optimizers, four parameters and a buffer on the device; and what their values are in program order."""

    def __init__(self, simulated: SimulatedDevice) -> None:
        self.device = simulated
        self.model = nn.Module()
        for i in range(4):
            size = LARGE if i % 2 == 0 else 512
            self.model.register_parameter(f"w{i}", nn.Parameter(simulated.tensor(100.0 * i, size)))
        with simulated.stream("other"):
            self.model.register_buffer("average", simulated.tensor(5.0))
        parameters = list(self.model.parameters())
        self.first, self.second = SimulatedSGD(simulated, parameters[:2]), SimulatedSGD(simulated, parameters[2:])
        self.optim = {"first": self.first, "second": self.second}
        self.values = {f"model/{name}": tensor[0].item() for name, tensor in self.model.state_dict().items()}
        for key, optim in self.optim.items():
            for name, parameter in self.model.named_parameters():
                if parameter in optim.state:
                    momentum = optim.state[parameter]["momentum"][0].item()
                    self.values[f"optim.{key}/state/{name}/momentum"] = momentum
        self.saved: dict[int, dict[str, float]] = {}
        self.graph: list[Any] | None = None

    def save(self, checkpointer: Checkpointer, step: int) -> Any:
        handle = checkpointer.save_async(self.model, self.optim, step)
        self.saved[step] = dict(self.values)
        return handle

    def step(self, stream: str = DEFAULT) -> None:
        """The second optimizer steps on a stream, which waits for the backward pass; or its graph is replayed."""
        device = self.device
        after_backward = device.record(DEFAULT)
        self.first.step()
        with device.stream(stream):
            device.wait(after_backward, side=False)
            if self.graph is None:
                self.second.step()
            else:
                for kernel in self.graph:
                    device.launch(kernel)
            joined = device.record(stream)
        device.wait(joined, side=False)
        self._count(("w0", "w1", "w2", "w3"))

    def turn(self, name: str) -> None:
        """One optimizer steps, on its own stream, in the order of the default stream."""
        device = self.device
        before = device.record(DEFAULT)
        with device.stream(name):
            device.wait(before, side=False)
            self.optim[name].step()
            joined = device.record(name)
        device.wait(joined, side=False)
        self._count(("w0", "w1") if name == "first" else ("w2", "w3"))

    def capture(self) -> None:
        """Capture the second optimizer's step into a graph; nothing is executed."""
        with self.device.graph() as self.graph:
            self.second.step()

    def replace_average(self) -> None:
        """Put new memory in the place of the average's: the old memory is free."""
        with self.device.stream("other"):
            value = self.values["model/average"] + 1
            self.model.average.data = self.device.tensor(value)
            self.values["model/average"] = value

    def check(self, checkpointer: Checkpointer) -> None:
        """Every committed checkpoint holds the values at its call."""
        for step, values in self.saved.items():
            found = {name: sorted(set(tensor.tolist())) for name, tensor in checkpointer.load(step).items()}
            assert found == {name: [value] for name, value in values.items()}, step

    def _count(self, names: tuple[str, ...]) -> None:
        for entry in self.values:
            if entry.split("/")[-1] in names or any(f"/{name}/" in entry for name in names):
                self.values[entry] += 1


@pytest.fixture(params=SCHEDULES)
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with plugged_in(request.param) as simulated:
        yield Training(simulated)
        simulated.synchronize()


def open_run(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(str(folder), run="r", writer="thread", compress="off", **options)


def test_optimizers_on_two_streams_a_graph_and_memory_that_is_freed(training: Training, tmp_path: Path) -> None:
    chance = training.device.random
    with open_run(tmp_path, slots=2) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
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
        checkpointer.wait()
        training.check(checkpointer)


def test_a_copy_that_fails_leaves_its_slot_alone_until_the_device_is_done(training: Training, tmp_path: Path) -> None:
    with open_run(tmp_path, slots=1) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        for step in range(0, 6, 2):
            training.step()
            training.device.fails_after = training.device.random.randint(1, 4)
            with pytest.raises(CkptError):
                checkpointer.save_async(training.model, training.optim, step).result(PATIENCE_S)
            training.device.fails_after = None
            training.save(checkpointer, step + 1).result(PATIENCE_S)
        training.check(checkpointer)


@pytest.mark.parametrize("seed", SCHEDULES)
def test_unpinnable_memory_goes_through_a_ring(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plugged_in(seed) as simulated, open_run(tmp_path) as checkpointer:
        simulated.refuses_pins = True
        training = Training(simulated)
        for step in range(4):
            training.step()
            training.save(checkpointer, step)
        checkpointer.wait()
        training.check(checkpointer)
        assert "cannot be pinned" in caplog.text
        simulated.synchronize()


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
            stepping = threading.Thread(target=optim.step)
            stepping.start()
            wait_until(lambda: simulated.queued(SIDE) > 1, "the copier to queue a copy", PATIENCE_S)
            released.set()
            stepping.join(PATIENCE_S)
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


def test_a_slot_that_is_refused_whole_is_pinned_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 MiB here, in which memory is not touched."""
    with plugged_in(0) as simulated:
        pin = simulated.pin
        monkeypatch.setattr(simulated, "pin", lambda at, size: pin(at, size) if size <= 20 << 20 else 2)
        segment = Segment(40 << 20)
        begin = addressof(segment.map)
        assert pin_segment(segment, DEVICES["cpu"](torch.device("cpu")))
        assert simulated.registered == {begin, begin + (16 << 20), begin + (32 << 20)}
        segment.close()


@pytest.mark.parametrize("limit", [1 << 40, 20 << 20], ids=["whole", "not at all"])
def test_pieces_that_no_copy_may_cross_are_not_used(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """limit: of the bytes that are pinned at once."""
    monkeypatch.setattr(device_copies, "PIN_BYTES", 16 << 20)
    with plugged_in(0) as simulated:
        pin, simulated.crosses_borders = simulated.pin, False
        monkeypatch.setattr(simulated, "pin", lambda at, size: pin(at, size) if size <= limit else 2)
        segment = Segment(40 << 20)
        assert pin_segment(segment, DEVICES["cpu"](torch.device("cpu"))) == (limit > 40 << 20)
        assert simulated.registered == ({addressof(segment.map)} if limit > 40 << 20 else set())
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


def test_a_capture_while_a_snapshot_is_copied_is_refused(tmp_path: Path) -> None:
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        training = Training(simulated)
        released = simulated.hang()
        training.save(checkpointer, 1)
        with pytest.raises(InvalidRequest, match=r"wait\(\)"):
            training.capture()
        released.set()
        checkpointer.wait()
        training.capture()
        training.check(checkpointer)
        simulated.synchronize()


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
            checkpointer.close(1.0)
        assert handle.exception() is not None
        released.set()
        simulated.synchronize()


def test_close_does_not_wait_for_a_launch_that_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other work of the process may have filled the queue of the driver."""
    monkeypatch.setattr(overlap, "_BLOCKED_S", 0.1)
    with plugged_in(0) as simulated:
        training, checkpointer = Training(simulated), open_run(tmp_path)
        checkpointer.prepare(training.model, training.optim)
        training.step()
        simulated.synchronize()
        released, simulated.queue_size = simulated.hang(SIDE), 1
        handle = training.save(checkpointer, 1)
        with pytest.raises(SaveFailed, match="did not finish"):
            checkpointer.close(0.1)
        assert isinstance(handle.exception(), SaveFailed)
        released.set()
        simulated.queue_size = 1 << 40
        simulated.synchronize()
        with suppress(CkptError):
            checkpointer.close()


def test_the_gate_waits_for_no_device(tmp_path: Path) -> None:
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        training = Training(simulated)
        checkpointer.prepare(training.model, training.optim)
        training.step()
        released = simulated.hang()
        handle = training.save(checkpointer, 1)
        training.step("other")  # returns though the device is stuck
        assert not handle.staged()
        released.set()
        handle.result(PATIENCE_S)
        training.check(checkpointer)


def test_copies_are_not_queued_behind_a_backlog_until_an_optimizer_steps(tmp_path: Path) -> None:
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        training = Training(simulated)
        checkpointer.prepare(training.model, training.optim)
        training.step()
        simulated.synchronize()
        released, polls = simulated.hang(), simulated.polls
        handle = training.save(checkpointer, 1)
        wait_until(lambda: simulated.polls > polls + 3, "the copier to wait for the device", PATIENCE_S)
        assert not simulated.queued(SIDE)
        training.step()
        assert simulated.queued(SIDE)
        released.set()
        handle.result(PATIENCE_S)
        training.check(checkpointer)


def test_a_change_that_moves_no_counter_is_found(training: Training, tmp_path: Path) -> None:
    """A kernel that is no optimizer's writes to a parameter after the call: the first overlapped saves find it."""
    with open_run(tmp_path) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        overwritten = training.model.get_parameter("w1")
        training.step()
        handle = training.save(checkpointer, 1)
        training.device.launch(add_one(overwritten))
        with suppress(SnapshotTorn):
            handle.result(PATIENCE_S)
        if isinstance(handle.exception(), SnapshotTorn):
            assert "model/w1" in str(handle.exception())
            del training.saved[1]
        training.check(checkpointer)


def test_slots_are_unpinned_before_they_are_unmapped(tmp_path: Path) -> None:
    with plugged_in(0) as simulated:
        training = Training(simulated)
        with open_run(tmp_path) as checkpointer:
            training.save(checkpointer, 1).result(PATIENCE_S)
            simulated.synchronize()
            assert simulated.registered
        del checkpointer

        def unpinned() -> bool:
            gc.collect()  # a closed Checkpointer is part of a cycle
            return not simulated.registered

        wait_until(unpinned, "the slots to be unpinned", PATIENCE_S)


FEW = 40
"""Copies of a save with many small leaves: parts, types, samples and digests."""


def test_large_leaves_and_single_ones_are_not_small() -> None:
    small, large = torch.empty(8, dtype=torch.uint8), torch.empty(SMALL_BYTES + 1, dtype=torch.uint8)
    assert by_size(([small], [small])) == (([], []), ([small], [small]))
    assert by_size(([small, large, small], [small, large, small])) == (
        ([small, small], [small, small]),
        ([large], [large]),
    )


@pytest.mark.parametrize("seed", SCHEDULES)
def test_many_small_leaves_are_few_copies(seed: int, tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    with plugged_in(seed) as simulated, open_run(tmp_path) as checkpointer:
        model = nn.ParameterList(torch.randn(1 + i % 7, 3).to(dtypes[i % 3]) for i in range(600))
        model.register_buffer("late", torch.randn(SMALL_BYTES))
        for i in range(600):
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


def test_what_a_graph_changes_is_gathered(training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Replays begin right after the call; nothing makes them wait for the host."""
    with caplog.at_level(logging.INFO, "ckpt"), open_run(tmp_path, slots=2) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        training.step()
        training.capture()
        for step in range(5):
            before = training.device.gathered_bytes
            training.save(checkpointer, step)
            if step:
                assert training.device.gathered_bytes - before >= 2 * SMALL_BYTES
            training.step(training.device.random.choice([DEFAULT, "other"]))
        checkpointer.wait()
        training.check(checkpointer)
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(said) == 1
    assert "in GPU memory first" in said[0]


@pytest.mark.parametrize("refusal", ["known", "on allocation", "unknown"])
def test_without_memory_on_the_device_it_is_copied_in_order(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture, refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, "ckpt"), open_run(tmp_path) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        training.step()
        training.capture()
        training.device.limit_bytes = SMALL_BYTES
        if refusal == "on allocation":
            monkeypatch.setattr(training.device, "free_bytes", iter([1 << 40, 0] * 100).__next__)
        if refusal == "unknown":  # the allocator is not torch's
            monkeypatch.setattr(training.device, "free_bytes", Mock(side_effect=RuntimeError("does not support")))
        for step in range(4):
            training.save(checkpointer, step)
            training.step("other")
        checkpointer.wait()
        training.check(checkpointer)
    said = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    assert len(said) == 1
    assert "has no room" in said[0]


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


def test_the_first_save_does_not_guess_how_much_memory_training_needs(tmp_path: Path) -> None:
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        training = Training(simulated)
        training.save(checkpointer, 0)
        assert simulated.gathered_bytes < SMALL_BYTES
        training.step()
        checkpointer.wait()
        training.check(checkpointer)
        simulated.synchronize()


def test_training_continues_beside_copies_of_what_was_gathered(tmp_path: Path) -> None:
    """The side stream is stuck; replays on the device are not."""
    with plugged_in(0) as simulated, open_run(tmp_path) as checkpointer:
        training = Training(simulated)
        checkpointer.prepare(training.model, training.optim)
        training.step()
        training.capture()
        training.save(checkpointer, 0).result(PATIENCE_S)
        handle = training.save(checkpointer, 1)
        with simulated.paused(SIDE):
            assert training.graph is not None
            for kernel in training.graph:
                simulated.launch(kernel)
            replayed = simulated.record(DEFAULT)
            wait_until(replayed.done, "the graph to be replayed", PATIENCE_S)
            assert not handle.staged()
        handle.result(PATIENCE_S)
        training.check(checkpointer)
        simulated.synchronize()
