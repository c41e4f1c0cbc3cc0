"""Overlap: training goes on while its state is copied, and what is stored is the state of the save, to the bit."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer

from ckpt import Checkpointer
from ckpt.capture.leaves import Captured
from ckpt.snapshot.stage import Transfer
from ckptstore.errors import SaveFailed, SnapshotTorn
from ckptstore.names import Attempt
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.loops import OPTIMIZERS, Loop, open_run
from tests.ckpt.snapshot.overlapping import held_copies, returns
from tests.support.parallel.runner import Outcome, Scenario, run_named
from tests.support.training import same_state
from tests.support.waiting import wait_until

PATIENCE_S = 30
Make = Callable[[list[torch.Tensor]], Any]


def stored(folder: Path, make: Make, step: int) -> Any:
    """The state of a step, in a new loop."""
    loop = Loop(make, seed=99)
    with open_run(folder) as checkpointer:
        assert checkpointer.restore(loop.model, loop.optim, checkpoint=step)
    return loop.state()


def _committed(folder: Path) -> list[int]:
    return [found.step for found in StoreSource(open_store(str(folder))).checkpoints("r")]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("options", [{"slots": 1}, {"overlap": "verify"}], ids=["default", "verify"])
@pytest.mark.usefixtures("everywhere")
def test_what_is_stored_is_the_state_of_the_save(make: Make, options: dict[str, Any], tmp_path: Path) -> None:
    loop, states = Loop(make), []
    with open_run(tmp_path, **options) as checkpointer:
        for step in range(4):
            states.append(loop.state())
            with held_copies(release_at_gate=True) as brake:
                checkpointer.save_async(loop.model, loop.optim, step)
                loop.step()
            assert brake.copies == 1  # begun when the optimizer waited for it
    assert all(same_state(stored(tmp_path, make, step), state) for step, state in enumerate(states))


def test_what_is_small_is_that_of_the_save_whatever_changes_it_afterwards(tmp_path: Path) -> None:
    """It is not put in its place before the rest is."""
    loop, states = Loop(make := OPTIMIZERS["adamw"]), []
    loop.step()
    with open_run(tmp_path) as checkpointer:
        for step in range(3):
            states.append(loop.state())
            with held_copies(release_at_gate=True, small_bytes=16 << 10) as brake:
                handle = checkpointer.save_async(loop.model, loop.optim, step)
                assert 0 < len(_later(checkpointer)) < 10
                loop.model.first.bias.data.add_(1.0)
                loop.model.norm.get_buffer("running_mean").add_(1.0)
                for state in loop.optim.state.values():
                    state["step"].add_(1)
                torch.rand(3)
                loop.step()
                handle.result(PATIENCE_S)
            assert brake.copies == 1
    assert all(same_state(stored(tmp_path, make, step), state) for step, state in enumerate(states))


@pytest.mark.usefixtures("everywhere")
def test_memory_for_a_freed_storage_does_not_wait_for_the_copy(tmp_path: Path) -> None:
    """FSDP allocates so in each forward. An empty leaf has the same address: none."""
    loop = Loop(OPTIMIZERS["adamw"])
    loop.model.register_parameter("empty", nn.Parameter(torch.empty(0), requires_grad=False))
    loop.model.register_buffer("placeholder", torch.empty(0))
    with open_run(tmp_path) as checkpointer:
        checkpointer.prepare(loop.model, loop.optim)
        loop.step()
        with held_copies() as brake:
            handle = checkpointer.save_async(loop.model, loop.optim, 1)
            torch.empty(0).untyped_storage().resize_(64)  # returns
            assert not brake.copies
        handle.result(PATIENCE_S)


@pytest.mark.usefixtures("everywhere")
def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["two"])
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        checkpointer.prepare(loop.model, loop.optim)
        loop.step()  # the leaves of a device overlap from now on
        handle = checkpointer.save_async(loop.model, loop.optim, 1)
        loop.backward()  # returns though nothing is copied
        before = copy.deepcopy(loop.model.state_dict())
        assert not handle.staged()
        assert not handle.wait_staged(0.01)
        stepped = returns(loop.optim["b"].step)
        assert brake.at_gate.wait(PATIENCE_S)
        assert not stepped(0.2)
        assert same_state(loop.model.state_dict(), before)
        brake.released.set()
        assert stepped(PATIENCE_S)
        assert handle.wait_staged(PATIENCE_S)
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


@pytest.mark.usefixtures("everywhere")
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


def test_a_change_before_the_step_fails_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = OPTIMIZERS["adamw-foreach"]
    loop = Loop(make)
    with open_run(tmp_path) as checkpointer, held_copies(release_at_gate=True) as brake:
        handle = checkpointer.save_async(loop.model, loop.optim, 1)
        with torch.no_grad():
            loop.model.first.weight.clamp_(-0.01, 0.01)
        loop.step()
        with pytest.raises(SnapshotTorn, match=r"model/first\.weight"):
            handle.result(PATIENCE_S)
        state, eager = loop.state(), checkpointer.save_async(loop.model, loop.optim, 2)
        assert eager.staged()  # overlap is off by then
        eager.result(PATIENCE_S)
        assert (brake.copies, _committed(tmp_path)) == (1, [2])
    assert same_state(stored(tmp_path, make, 2), state)
    warned = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
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
        assert [Attempt.parse(path.stem).step for path in (tmp_path / "r" / "commits").glob("000001-*")] == [2]


def test_an_unseen_torn_snapshot_is_raised_by_the_next_save(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer, held_copies() as brake:
        checkpointer.save_async(loop.model, loop.optim, 1)
        nn.init.zeros_(loop.model.last.bias)
        brake.released.set()
        with pytest.raises(SnapshotTorn):
            checkpointer.save_async(loop.model, loop.optim, 2)


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize(
    ("place", "error"),
    [((Transfer, "copy"), OSError("no such memory")), ((Captured, "write"), MemoryError("no more"))],
    ids=["copy", "job"],
)
def test_a_copy_or_a_job_that_fails_fails_the_save_and_frees_the_optimizer(
    place: tuple[Any, str], error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path, slots=1) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(*place, Mock(side_effect=error))
            handle = checkpointer.save_async(loop.model, loop.optim, 1)
            loop.step()
            with pytest.raises(SaveFailed, match=str(error)):
                checkpointer.save_async(loop.model, loop.optim, 2)
            assert place[0] is Captured or not handle.staged()
        assert checkpointer.save(loop.model, loop.optim, 2).step == 2


@pytest.mark.usefixtures("everywhere")
def test_memory_that_a_parameter_gave_up_is_what_is_stored(tmp_path: Path) -> None:
    loop = Loop(make := OPTIMIZERS["adamw"])
    state = loop.state()
    with open_run(tmp_path) as checkpointer, held_copies(release_at_gate=True):
        checkpointer.save_async(loop.model, loop.optim, 1)
        for parameter in loop.model.parameters():
            parameter.data = parameter.data * 2  # as .to() does
        loop.step()
    assert same_state(stored(tmp_path, make, 1), state)


@pytest.mark.usefixtures("everywhere")
def test_memory_is_let_go_once_it_is_copied(tmp_path: Path) -> None:
    loop = Loop(OPTIMIZERS["adamw"])
    given_up = weakref.ref(loop.model.first.weight)
    with open_run(tmp_path) as checkpointer:
        handle = checkpointer.save_async(loop.model, loop.optim, 1)
        del loop
        gc.collect()
        wait_until(lambda: given_up() is None, "the memory to be let go", PATIENCE_S)
        assert handle.result().step == 1


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
            for repeat in range(1 + (step == 0)):  # saves without a step between them prove nothing
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
        checkpointer.wait()
        for step, average in zip((0, 1, 10, 20, 30), averages, strict=True):
            assert torch.equal(checkpointer.load(step, "model/average.weight")["model/average.weight"], average)


def _later(checkpointer: Checkpointer) -> set[str]:
    assert checkpointer._saves.overlap is not None
    pending = checkpointer._saves.overlap._pending
    if pending is None:
        return set()
    return {piece.entry for piece in pending.transfer.later.slices}


@pytest.mark.usefixtures("everywhere")
def test_a_forked_child_waits_for_no_copy(tmp_path: Path) -> None:
    """Before a step, and before it replaces its memory."""
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
            loop.model.first.weight.untyped_storage().resize_(0)
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


@pytest.mark.usefixtures("everywhere")
def test_nothing_of_a_closed_checkpointer_stays_with_optimizers(tmp_path: Path) -> None:
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    loop = Loop(OPTIMIZERS["adamw"])
    with open_run(tmp_path) as checkpointer:
        checkpointer.save(loop.model, loop.optim, 1)
        checkpointer.save(loop.model, loop.optim, 2)
        assert len(torch_optimizer._global_optimizer_pre_hooks) == before + 1
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before


_LAYOUTS = ("ddp", "fsdp2", "fsdp1")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("overlap")
    scenarios = {}
    for layout in _LAYOUTS:
        arguments = {"store": str(folder / layout), "layout": layout}
        scenarios[layout] = Scenario("tests.ckpt.snapshot.overlapping:stored_alike", 2, arguments)
    arguments = {"store": str(folder / "changed")}
    scenarios["changed"] = Scenario("tests.ckpt.snapshot.overlapping:change_on_both_ranks", 2, arguments)
    return run_named(scenarios, folder / "ranks")


@pytest.mark.parametrize("layout", _LAYOUTS)
def test_ranks_store_the_state_of_the_save(outcomes: dict[str, Outcome], layout: str) -> None:
    for rank, result in enumerate(outcomes[layout].result()):
        assert result["alike"] == [True] * 3
        assert result["copies"] == (0 if layout == "ddp" and rank else 3)  # replicas are written by rank 0


def test_ranks_that_change_their_weights_commit_no_two_moments_in_one_checkpoint(outcomes: dict[str, Outcome]) -> None:
    torn, other = outcomes["changed"].result()
    assert torn["code"] == "snapshot_torn"
    assert "model/" in torn["said"]
    assert other["code"] == "rank_failed"
    for result in (torn, other):
        assert (sorted(result["steps"]), set(map(tuple, result["values"].values()))) == ([1, 3], {(0.5,)})
