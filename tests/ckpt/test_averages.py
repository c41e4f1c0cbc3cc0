from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt import Checkpointer
from ckptstore.errors import SnapshotTorn
from tests.ckpt.averaging import RUN, Training
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import held_copies
from tests.support.command_line import invoke
from tests.support.forking import TRAINER, fork
from tests.support.training import same_state
from tests.support.waiting import Lines

PATIENCE_S = 30
Overlap = Literal[True, "verify"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As forks have: the order of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_a_killed_run_resumes_with_its_average(tmp_path: Path) -> None:
    said, says = os.pipe()
    trainer = fork(TRAINER, "tests.ckpt.averaging", [str(tmp_path)], stdout=says, stderr=2)
    os.close(says)
    with open(said) as output:
        lines = Lines(output)
        while lines.next() != "4\n":
            pass
        trainer.kill()
        trainer.wait(PATIENCE_S)

    resumed = Training(seed=99)
    with Checkpointer(str(tmp_path), run=RUN) as checkpointer:
        restored = checkpointer.restore(resumed.model, resumed.optim, ema=resumed.ema)
    assert restored is not None
    assert restored.step >= 4
    resumed.step()
    reference = Training()
    for _ in range(restored.step + 2):
        reference.step()
    assert same_state(resumed.state(), reference.state())


def test_an_average_is_exported_by_the_names_of_the_model(tmp_path: Path) -> None:
    training = Training()
    training.step()
    training.step()
    with Checkpointer(str(tmp_path / "store"), run=RUN) as checkpointer:
        checkpointer.save(training.model, training.optim, 1, ema=training.ema)
    more = ("--format", "huggingface", "--names", "ema/module.*", "--store", tmp_path / "store")
    assert invoke("export", f"{RUN}@1", "--to", tmp_path / "hf", *more).code == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    plain = Training(seed=99).model
    plain.load_state_dict(exported)
    assert same_state(plain.state_dict(), training.ema.module.state_dict())
    assert not same_state(plain.state_dict(), training.model.state_dict())


class _Copied:
    """As torch_ema and diffusers' EMAModel do: the weights are kept aside and overwritten."""

    def __init__(self, parameters: list[nn.Parameter], average: list[torch.Tensor]) -> None:
        self._parameters, self._raw = parameters, [p.detach().clone() for p in parameters]
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.data.copy_(mean)

    def swap_back(self) -> None:
        for parameter, raw in zip(self._parameters, self._raw, strict=True):
            parameter.data.copy_(raw)


class _Exchanged:
    """The parameters get other memory."""

    def __init__(self, parameters: list[nn.Parameter], average: list[torch.Tensor]) -> None:
        self._parameters, self._raw = parameters, [p.data for p in parameters]
        for parameter, mean in zip(parameters, average, strict=True):
            parameter.data = mean.clone()

    def swap_back(self) -> None:
        for parameter, raw in zip(self._parameters, self._raw, strict=True):
            parameter.data = raw


def _large() -> tuple[Any, torch.optim.Optimizer, list[torch.Tensor]]:
    model = nn.ParameterList(torch.randn(size) for size in (100, 1 << 16, 1 << 20, 1 << 12, 1 << 18))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn_like(p) for p in model]


@pytest.mark.parametrize("overlap", [True, "verify"])
@pytest.mark.parametrize("kind", [_Copied, _Exchanged])
def test_an_average_swapped_in_is_stored_or_fails(kind: Callable[..., Any], overlap: Overlap, tmp_path: Path) -> None:
    """The copy runs at its own pace: it may be complete before the swap back, behind it or in the middle."""
    for number in range(6):
        model, optim, average = _large()
        with open_run(tmp_path / str(number), overlap=overlap) as checkpointer:
            swapped = kind(list(model), average)
            handle = checkpointer.save_async(model, optim, 1)
            swapped.swap_back()
            optim.step()
            try:
                handle.result(PATIENCE_S)
            except SnapshotTorn:
                assert kind is _Copied
                assert checkpointer.latest() is None
                continue
            stored = checkpointer.load(1, "model/*")
            assert same_state([stored[f"model/{i}"] for i in range(5)], average)


@pytest.mark.parametrize("overlap", [True, "verify"])
@pytest.mark.parametrize("kind", [_Copied, _Exchanged])
def test_an_average_swapped_out_before_the_copy(kind: Callable[..., Any], overlap: Overlap, tmp_path: Path) -> None:
    model, optim, average = _large()
    with open_run(tmp_path, overlap=overlap) as checkpointer:
        with held_copies(release_at_gate=True):
            swapped = kind(list(model), average)
            handle = checkpointer.save_async(model, optim, 1)
            swapped.swap_back()
            optim.step()
            if kind is _Copied:
                with pytest.raises(SnapshotTorn, match="model/"):
                    handle.result(PATIENCE_S)
                return
            handle.result(PATIENCE_S)
        assert same_state([checkpointer.load(1)[f"model/{i}"] for i in range(5)], average)
