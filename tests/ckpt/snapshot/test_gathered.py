"""Leaves that a device gathers before they are copied: small ones together, and what cannot wait at the gate."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt.snapshot.device_copies import SMALL_BYTES, by_size
from tests.ckpt.snapshot.simulated import DEFAULT, SIDE, add_one, plugged_in
from tests.ckpt.snapshot.test_device_copies import PATIENCE_S, SCHEDULES, Training, open_run
from tests.support.waiting import wait_until

FEW = 40
"""Copies of a save with many small leaves: parts, types, samples and digests."""


@pytest.fixture(params=SCHEDULES)
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with plugged_in(request.param) as simulated:
        yield Training(simulated)
        simulated.synchronize()


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


def test_what_a_graph_changes_is_copied_on_the_device_first(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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


@pytest.mark.parametrize("refusal", ["known", "on allocation"])
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
