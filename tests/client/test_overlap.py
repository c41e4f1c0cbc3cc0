"""Overlap: training goes on while its state is copied, and what is stored is the state of the save, to the bit."""

from __future__ import annotations

import copy
import logging
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim import optimizer as torch_optimizer

from ckpt import Checkpointer
from ckpt.capture.repeated import Capturer
from ckpt.saving.transfer import Transfer
from ckptstore.errors import SaveFailed, SnapshotTorn
from ckptstore.source import read_manifest
from tests.support.overlapping import held_copies
from tests.support.training import same_state

PATIENCE_S = 30


class Net(nn.Module):
    """Batch norm, whose buffers change in forward; dropout; a layer that is not contiguous; a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 96)
        self.norm = nn.BatchNorm1d(96)
        self.frozen = nn.Linear(96, 96).requires_grad_(False)
        self.last = nn.Linear(96, 64)
        self.last.weight.data = self.last.weight.data.t().contiguous().t()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(torch.relu(self.norm(self.first(inputs))))
        out: torch.Tensor = self.last(torch.dropout(hidden, 0.1, train=True))
        return out


class Loop:
    """A model, its optimizers, and a step of training on random numbers."""

    def __init__(self, make: Callable[[list[torch.Tensor]], Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optim = make([p for p in self.model.parameters() if p.requires_grad])

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = (self.model(torch.randn(16, 64)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def closure(self) -> float:
        self.model.zero_grad()
        return self.backward().item()

    def step(self) -> None:
        if isinstance(self.optim, LBFGS):
            self.optim.step(self.closure)  # type: ignore[no-untyped-call]
            return
        self.backward()
        for optimizer in self.optimizers():
            optimizer.step()
        self.model.zero_grad()

    def optimizers(self) -> Iterable[Optimizer]:
        return self.optim.values() if isinstance(self.optim, dict) else [self.optim]

    def state(self) -> Any:
        found = (self.model.state_dict(), [optimizer.state_dict() for optimizer in self.optimizers()])
        return copy.deepcopy(found), torch.get_rng_state()


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "adamw": lambda p: AdamW(p, lr=0.01, foreach=False),
    "adamw-foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.01, fused=True),
    "sgd-momentum": lambda p: SGD(p, lr=0.01, momentum=0.9),
    "lbfgs": lambda p: LBFGS([q for q in p if q.is_contiguous()], lr=0.1, max_iter=3),
    "two": lambda p: {"a": AdamW(p[:2], lr=0.01), "b": SGD(p[2:], lr=0.01, momentum=0.9)},
}


def open_run(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(str(folder), run="r", **{"writer": "thread", **options})


def stored(folder: Path, make: Callable[[list[torch.Tensor]], Any], step: int) -> Any:
    """The state of a step, in a loop that was made anew."""
    loop = Loop(make, seed=99)
    with open_run(folder) as checkpointer:
        assert checkpointer.restore(loop.model, loop.optim, checkpoint=step)
    return loop.state()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_is_stored_is_the_state_of_the_save(make: Callable[[list[torch.Tensor]], Any], tmp_path: Path) -> None:
    loop, states = Loop(make), []
    with open_run(tmp_path, slots=1, writer="process") as checkpointer:
        for step in range(4):
            states.append(loop.state())
            with held_copies(release_at_gate=True) as brake:
                checkpointer.save_async(loop.model, loop.optim, step)
                loop.step()
            assert brake.copies == 1  # begun when the optimizer waited for it
    assert all(same_state(stored(tmp_path, make, step), state) for step, state in enumerate(states))


def test_copies_at_their_own_pace(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw-fused"]
    for seed in range(3):
        loop, states = Loop(make, seed), []
        with open_run(tmp_path / str(seed)) as checkpointer:
            for step in range(6):
                states.append(loop.state())
                checkpointer.save_async(loop.model, loop.optim, step)
                loop.step()
        for step in (0, 1, 5):
            assert same_state(stored(tmp_path / str(seed), make, step), states[step])


def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["two"])
    loop.step()
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        handle = checkpointer.save_async(loop.model, loop.optim, 1)
        loop.backward()  # returns though nothing is copied
        before = copy.deepcopy(loop.model.state_dict())
        assert not handle.staged()
        stepping = threading.Thread(target=loop.optim["b"].step)
        stepping.start()
        assert brake.at_gate.wait(PATIENCE_S)
        stepping.join(0.2)
        assert stepping.is_alive()
        assert same_state(loop.model.state_dict(), before)
        brake.released.set()
        stepping.join(PATIENCE_S)
        assert not stepping.is_alive()
        assert handle.staged(PATIENCE_S)
        assert not same_state(loop.model.state_dict(), before)
        loop.optim["a"].step()
        handle.result(PATIENCE_S)


def test_a_save_without_an_optimizer_or_without_overlap_is_staged_on_return(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with held_copies():
        with open_run(tmp_path / "a") as checkpointer:
            assert checkpointer.save_async(loop.model, None, 1).staged()
        with open_run(tmp_path / "b", overlap=False) as checkpointer:
            assert checkpointer.save_async(loop.model, loop.optim, 1).staged()


def test_gradients_are_those_of_the_save(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw"]
    loop = Loop(make)
    loop.backward()
    grads = {name: p.grad.clone() for name, p in loop.model.named_parameters() if p.grad is not None}
    with open_run(tmp_path) as checkpointer, held_copies(release_at_gate=True):
        checkpointer.save_async(loop.model, loop.optim, 1, grads=True)
        loop.backward()
        loop.optim.step()
    other = Loop(make)
    with open_run(tmp_path) as checkpointer:
        checkpointer.restore(other.model, other.optim)
    found = {name: p.grad for name, p in other.model.named_parameters() if p.grad is not None}
    assert same_state(found, grads)


def test_a_change_before_the_step_has_the_copy_taken_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = OPTIMIZERS["adamw-foreach"]
    loop = Loop(make)
    with open_run(tmp_path) as checkpointer, held_copies(release_at_gate=True) as brake:
        for step in (1, 2):
            handle = checkpointer.save_async(loop.model, loop.optim, step)
            assert handle.staged() == (step == 2)  # overlap is off by then
            with torch.no_grad():
                loop.model.first.weight.clamp_(-0.01, 0.01)
            clamped = copy.deepcopy(loop.model.state_dict())
            rng = torch.get_rng_state()
            loop.step()
            if step == 1:
                handle.result(PATIENCE_S)
                (model, _), stored_rng = stored(tmp_path, make, 1)
                assert same_state(model["first.weight"], clamped["first.weight"])
                # What forward changes is from before it, and so are the random numbers.
                assert model["norm.num_batches_tracked"] == clamped["norm.num_batches_tracked"]
                assert torch.equal(stored_rng, rng)
        assert brake.copies == 1
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "model/first.weight" in warned[0]


@pytest.mark.parametrize("past_the_counter", [False, True])
def test_a_change_without_an_optimizer_fails_the_save(tmp_path: Path, past_the_counter: bool) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer:
        with held_copies() as brake:
            handle = checkpointer.save_async(loop.model, loop.optim, 1)
            with torch.no_grad():
                weight = loop.model.first.weight
                (weight.data if past_the_counter else weight).mul_(0.5)
            brake.released.set()
            with pytest.raises(SnapshotTorn, match=r"model/first\.weight"):
                checkpointer.wait()
        assert isinstance(handle.exception(), SnapshotTorn)
        assert not handle.staged()
        assert checkpointer.latest() is None
        again = checkpointer.save_async(loop.model, loop.optim, 2)
        assert again.staged()
        again.result(PATIENCE_S)
        assert [path.name[:12] for path in (tmp_path / "r" / "commits").iterdir()] == ["000000000002"]


def test_an_unseen_torn_snapshot_is_raised_by_the_next_save(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        checkpointer.save_async(loop.model, loop.optim, 1)
        nn.init.zeros_(loop.model.last.bias)
        brake.released.set()
        with pytest.raises(SnapshotTorn):
            checkpointer.save_async(loop.model, loop.optim, 2)


def test_a_copy_that_fails_fails_the_save_and_lets_the_optimizer_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(OPTIMIZERS["adamw"])

    def fail(_: Transfer) -> None:
        raise OSError("no such memory")

    with open_run(tmp_path, slots=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(Transfer, "copy", fail)
            handle = checkpointer.save_async(loop.model, loop.optim, 1)
            loop.step()
            with pytest.raises(SaveFailed, match="no such memory"):
                checkpointer.save_async(loop.model, loop.optim, 2)
            assert not handle.staged()
        assert checkpointer.save(loop.model, loop.optim, 2).step == 2


def test_memory_that_a_parameter_gave_up_is_what_is_stored(tmp_path: Path) -> None:
    loop = Loop(make := OPTIMIZERS["adamw"])
    state = loop.state()
    with open_run(tmp_path) as checkpointer, held_copies(release_at_gate=True):
        checkpointer.save_async(loop.model, loop.optim, 1)
        for parameter in loop.model.parameters():
            parameter.data = parameter.data * 2  # as .to() does
        loop.step()
    assert same_state(stored(tmp_path, make, 1), state)


def test_frozen_parameters_overlap_once_they_were_seen_to_stay(tmp_path: Path) -> None:
    """A frozen base does; an average that is moved past all counters is copied on return."""
    widths = {"base": 1024, "average": 1024, "adapter": 4}
    model: Any = nn.ModuleDict({name: nn.Linear(512, width) for name, width in widths.items()})
    model["base"].requires_grad_(False)
    model["average"].requires_grad_(False)
    optim = SGD(model["adapter"].parameters(), lr=0.1)
    later: list[set[str]] = []
    averages = []
    with open_run(tmp_path) as checkpointer:
        for step in range(4):
            for repeat in range(1 + (step == 0)):  # saves without a step between them tell nothing
                with held_copies(release_at_gate=True) as brake:
                    checkpointer.save_async(model, optim, 10 * step + repeat)
                    later.append(_later(checkpointer))
                    averages.append(model["average"].weight.detach().clone())
                    if repeat == 0 and step == 0:
                        brake.released.set()
                        continue
                    model["average"].weight.data.add_(1.0)
                    model["adapter"](torch.ones(2, 512)).sum().backward()
                    optim.step()
        assert later[:3] == [{"model/adapter.weight", "model/adapter.bias"}] * 3
        assert later[3:] == [{"model/adapter.weight", "model/adapter.bias", "model/base.weight"}] * 2
        for step, average in zip((0, 1, 10, 20, 30), averages, strict=True):
            assert torch.equal(checkpointer.load(step, "model/average.weight")["model/average.weight"], average)


def _later(checkpointer: Checkpointer) -> set[str]:
    assert checkpointer._overlap is not None
    flight = checkpointer._overlap._flight
    return set() if flight is None else {leaf.slice.entry for leaf in flight.transfer.later}


def test_saves_follow_a_structure_that_changes(tmp_path: Path) -> None:
    """Descriptions are used again from save to save; each of these changes what is to be described."""
    loop = Loop(OPTIMIZERS["adamw"])
    model: Any = loop.model
    states: list[Any] = []

    def moved() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def tied() -> None:
        model.last.bias = nn.Parameter(model.last.bias.detach())
        model.register_parameter("twin", model.last.bias)
        checkpointer.prepare(model, loop.optim)

    def widened() -> None:
        model.extra = nn.Linear(8, 8)
        loop.optim.add_param_group({"params": list(model.extra.parameters())})
        checkpointer.prepare(model, loop.optim)

    def halved() -> None:
        model.frozen.to(torch.float64)
        checkpointer.prepare(model, loop.optim)

    def turned() -> None:
        loop.optim.param_groups.reverse()
        loop.optim.param_groups[0]["lr"] = 0.5
        checkpointer.prepare(model, loop.optim)  # a parameter of no module is named by its place

    def hooked() -> None:
        model.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}more": torch.ones(3)}))
        checkpointer.prepare(model, loop.optim)

    def nothing() -> None:
        pass

    changes = (nothing, nothing, loop.step, moved, nothing, tied, widened, halved, turned, nothing, hooked, nothing)
    with (
        open_run(tmp_path, overlap=False) as reference,
        open_run(tmp_path / "again") as checkpointer,
    ):
        for step, change in enumerate(changes):
            change()
            states.append(checkpointer.save(model, loop.optim, step))
            reference._capturer = Capturer()
            reference._agreement = None
            fresh = reference.save(model, loop.optim, step)
            assert same_state(checkpointer.load(step), reference.load(step)), change.__name__
            assert _trees(checkpointer, states[-1]) == _trees(reference, fresh), change.__name__


def _trees(checkpointer: Checkpointer, checkpoint: Any) -> Any:
    content = read_manifest(checkpointer._source, checkpoint)
    return content.content.trees, content.content.aliases


def test_a_forked_child_waits_for_no_copy(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        handle = checkpointer.save_async(loop.model, loop.optim, 1)
        loop.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
            child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE_S)
            for hook in torch_optimizer._global_optimizer_pre_hooks.values():
                hook(loop.optim, (), {})  # a step itself may hang in a child, in threads that it does not have
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        brake.released.set()
        handle.result(PATIENCE_S)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_compiled_step_waits_too(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw-foreach"]
    loop = Loop(make)
    compiled: Any = torch.compile(loop.optim.step, backend="eager")
    loop.step()
    with open_run(tmp_path) as checkpointer:
        for step in (1, 2):
            state = loop.state()
            with held_copies(release_at_gate=True) as brake:
                handle = checkpointer.save_async(loop.model, loop.optim, step)
                loop.backward()
                assert not brake.at_gate.is_set()
                compiled()
                handle.result(PATIENCE_S)
            assert brake.at_gate.is_set()
            assert same_state(stored(tmp_path, make, step), state)


def test_nothing_of_a_closed_checkpointer_stays_with_optimizers(tmp_path: Path) -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(loop.model, loop.optim, 1)
        checkpointer.save(loop.model, loop.optim, 2)
        assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
