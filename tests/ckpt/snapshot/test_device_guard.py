"""What is found on a device: changes of any byte by digests in the first saves of a layout, by samples in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
import torch

from ckpt.device import _DIGEST_BYTES, digests
from ckpt.snapshot.guard import _warn_once, sample_places
from ckptstore.errors import SnapshotTorn
from tests.ckpt.snapshot.simulated import DEFAULT, SIDE, SimulatedDevice, Training, add_one, one_schedule
from tests.support.waiting import wait_until

PATIENCE_S = 60

MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "a byte": lambda: torch.zeros(1, dtype=torch.uint8),
    "a scalar": lambda: torch.zeros(()),
    "odd": lambda: torch.zeros(100_003, dtype=torch.uint8),
    "half": lambda: torch.zeros(3001, dtype=torch.bfloat16),
    "shifted": lambda: torch.zeros(3001, dtype=torch.bfloat16)[1:],
    "transposed": lambda: torch.zeros(70, 130).t(),
    "complex": lambda: torch.zeros(300, dtype=torch.complex128),
    "several pieces": lambda: torch.zeros(_DIGEST_BYTES // 4 + 5),
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=MEMORY.keys())
def test_a_digest_differs_if_any_element_does(make: Callable[[], torch.Tensor]) -> None:
    tensor, random = make(), Random(0)
    copy = tensor.clone(memory_format=torch.contiguous_format)
    assert torch.equal(digests([tensor]), digests([copy]))
    flat = copy.view(-1)
    for at in {0, flat.numel() - 1, random.randrange(flat.numel())}:
        flat[at] = 1
        assert not torch.equal(digests([tensor]), digests([copy]))
        flat[at] = 0
    assert torch.equal(digests([tensor]), digests([copy]))


def test_a_digest_differs_if_elements_change_places() -> None:
    tensor = torch.arange(10_000.0)
    for other in (tensor.flip(0), tensor.roll(1), torch.cat([tensor[4096:8192], tensor[:4096], tensor[8192:]])):
        assert not torch.equal(digests([tensor]), digests([other]))


def test_digests_are_those_of_each_tensor() -> None:
    first, second = torch.rand(1000), torch.rand(17)
    found = digests([first, second, torch.empty(0)])
    assert found.tolist() == [*digests([first]).tolist(), *digests([second]).tolist(), 0]


@one_schedule
def test_a_change_of_one_element_fails_the_first_saves_of_a_layout(training: Training, tmp_path: Path) -> None:
    """A kernel on a stream of its own changes it after the digest and before the copy, where there is no sample."""
    digest, changed = SimulatedDevice.digest, training.model.get_parameter("w0").detach()[3:4]

    def digest_and_change(device: SimulatedDevice, into: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        digest(device, into, tensors)
        with device.stream(SIDE):
            device.launch(add_one(changed))

    with training.run(tmp_path) as checkpointer, patch.object(SimulatedDevice, "digest", digest_and_change):
        handle = training.save(checkpointer, 1)
        with pytest.raises(SnapshotTorn, match="model/w0"):
            handle.result(PATIENCE_S)
        training.saved.clear()


def test_samples_are_in_the_middle_of_leaves_and_all_of_small_ones() -> None:
    numbers = torch.arange(1000.0)
    tensors = [
        numbers,
        numbers[:3],
        torch.ones(1, dtype=torch.uint8),
        numbers[:0],
        numbers[10:30],
        numbers.view(50, 20).t(),
    ]
    tensors.append(torch.ones(40, dtype=torch.complex64).conj())
    found = sample_places(range(0, 7000, 1000), tensors)
    places = {
        number: (size, source - tensors[number].data_ptr(), to - 1000 * number)
        for size, *columns in found
        for number, source, to in zip(*(column.tolist() for column in columns), strict=True)
    }
    assert places == {0: (64, 2000, 2000), 1: (12, 0, 0), 2: (1, 0, 0), 4: (64, 16, 16)}


def test_any_save_finds_a_change_after_the_call(training: Training, tmp_path: Path) -> None:
    """A kernel that moves no counter, of the same stream, right after the call: the samples are those of the call."""
    with training.run(tmp_path) as checkpointer:
        for step in range(4):
            training.save(checkpointer, step).result(PATIENCE_S)
            training.step()
        with training.device.paused(SIDE):
            handle = training.save(checkpointer, 4)
            training.device.launch(add_one(training.model.get_parameter("w1")))
            changed = training.device.record(DEFAULT)
            wait_until(changed.done, "the change", PATIENCE_S)
        with pytest.raises(SnapshotTorn, match="model/w1"):
            handle.result(PATIENCE_S)
        del training.saved[4]


@one_schedule
def test_what_cannot_be_read_costs_no_save_and_is_said_once(
    training: Training, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_once.cache_clear()
    with (
        patch.object(SimulatedDevice, "read", side_effect=ValueError("pointer resides on host memory")),
        patch.object(SimulatedDevice, "digest", side_effect=IndexError("out of range")),
        training.run(tmp_path) as checkpointer,
    ):
        for step in range(3):
            training.save(checkpointer, step).result(PATIENCE_S)
            training.step()
    said = [record for record in caplog.records if record.name == "ckpt.snapshot.guard"]
    assert [record.getMessage().split()[0] for record in said] == ["samples", "digests"]
    assert ["pointer resides" in str(record.exc_text) for record in said] == [True, False]


@one_schedule
def test_later_saves_of_a_layout_read_no_digests(training: Training, tmp_path: Path) -> None:
    counts, digest = [0], SimulatedDevice.digest

    def counted(device: SimulatedDevice, into: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        counts[-1] += len(tensors)
        digest(device, into, tensors)

    with training.run(tmp_path) as checkpointer, patch.object(SimulatedDevice, "digest", counted):
        for step in range(6):
            if step == 4:
                training.model.register_parameter("w4", torch.nn.Parameter(training.device.tensor(1.0)))
                checkpointer.prepare(training.model, training.optim)
            handle = checkpointer.save_async(training.model, training.optim, step)
            training.step()
            handle.result(PATIENCE_S)
            counts.append(0)
    assert counts == [8, 8, 0, 0, 10 + 8, 8, 0]  # prepare reads all leaves
