"""overlap="verify": digests of the call and of the copied bytes decide, so that no change is missed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.snapshot import stage
from ckpt.snapshot.guard import DigestGuard, memory_at
from ckptstore.errors import InvalidRequest, SnapshotTorn
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import guarded, held_copies
from tests.ckpt.snapshot.simulated import PromptDevice, plugged_in
from tests.support.training import same_state

PATIENCE_S = 30


def _write_between_samples(model: Any) -> None:
    """Rows that lie between the first two places of a sample, past the version counter."""
    model.weight.data[2:10] = 7


def _linear() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Linear(300, 300)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("overlap", "large", "place", "stored"),
    [
        ("verify", False, nullcontext, "nothing"),
        ("verify", False, lambda: plugged_in(0, PromptDevice), "before the change"),
        (True, False, nullcontext, "nothing"),
        (True, True, nullcontext, "after the change"),
    ],
    ids=["verify", "verify on a device", "default", "default in a large state"],
)
def test_a_change_between_samples(
    overlap: Any, large: bool, place: Any, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device has queued its copies at the call. That a large state is stored changed is the documented limit of
    samples; if it goes, so does its description in docs/explanation/what-is-saved.md."""
    model, optim = _linear()
    state = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    if large:
        monkeypatch.setattr(stage, "WHOLE_BYTES", 0)
    with place(), open_run(tmp_path, overlap=overlap) as checkpointer:
        checkpointer.prepare(model, optim)
        optim.step()  # otherwise the leaves of a device never overlap
        with held_copies(release_at_gate=True):
            handle = checkpointer.save_async(model, optim, 1)
            _write_between_samples(model)
            optim.step()
            if stored == "nothing":
                with pytest.raises(SnapshotTorn, match="model/weight"):
                    handle.result(PATIENCE_S)
                assert checkpointer.latest() is None
                assert checkpointer.save_async(model, optim, 2).staged()  # overlap is off by then
                return
            handle.result(PATIENCE_S)
        found = checkpointer.load(1, "model/*")
    assert same_state(found, state) == (stored == "before the change")
    assert bool((found["model/weight"][2:10] == 7).all()) == (stored == "after the change")


@pytest.mark.usefixtures("everywhere")
def test_a_change_after_the_copy_of_a_tensor_is_no_failure(tmp_path: Path) -> None:
    """The copied bytes are those of the call; that the memory has changed since does not matter."""
    model, optim = _linear()
    state = {f"model/{name}": value.clone() for name, value in model.state_dict().items()}
    with open_run(tmp_path, overlap="verify") as checkpointer:
        handle = checkpointer.save_async(model, optim, 1)
        assert handle.wait_staged(PATIENCE_S)
        _write_between_samples(model)
        optim.step()
        handle.result(PATIENCE_S)
        assert same_state(checkpointer.load(1, "model/*"), state)


def test_copies_in_pieces_count_once_they_are_complete() -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (0, 1, 70_000, 100_000)]
    guard = guarded(DigestGuard, *tensors)
    assert guard.changed(range(4)) == ["t1", "t2", "t3"]  # nothing has been copied
    for index, tensor in enumerate(tensors):
        copied = bytearray(tensor.numpy().tobytes())
        for at in range(0, len(copied), 30_000):
            piece = torch.frombuffer(copied, dtype=torch.uint8)[at : at + 30_000]
            assert guard.copied(index, piece.data_ptr(), piece.nbytes)
    assert guard.changed(range(4)) == []


def test_one_wrong_bit_in_the_copy_is_a_change_and_names_its_tensor_alone() -> None:
    tensors = [torch.zeros(70_000, dtype=torch.uint8) for _ in range(3)]
    guard = guarded(DigestGuard, *tensors)
    assert guard.copied(0, tensors[0].data_ptr(), 70_000)
    wrong = tensors[1].clone()
    wrong[12_345] ^= 1
    assert not guard.copied(1, wrong.data_ptr(), 70_000)
    assert guard.changed(range(3)) == ["t1"]


def test_digests_are_of_all_bytes_whatever_the_number_of_threads() -> None:
    tensors = [torch.full((100,), number, dtype=torch.uint8) for number in range(200)]
    threads = torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            guard = guarded(DigestGuard, *tensors)
            assert all(guard.copied(i, t.data_ptr(), t.nbytes) for i, t in enumerate(tensors))
            assert guard.changed(range(200)) == []
    finally:
        torch.set_num_threads(threads)
    assert bytes(memory_at(tensors[7].data_ptr(), 3)) == bytes([7] * 3)


def test_another_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="overlap 'always'") as caught:
        open_run(tmp_path, overlap="always")
    assert caught.value.hint == "Use True, False or 'verify'"
