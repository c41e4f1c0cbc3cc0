"""Stored bytes of saves with few changes, relative to the changed bytes; and the cost of comparing elsewhere.

A frozen, trained GPT with low-rank adapters next to its linear layers: they and their AdamW state are trained for a
step before each save. Stored bytes are all bytes in the store's folder at the end, with documents and marks. Changed
bytes are the raw bytes of all tensors of the first save, and after it those of the tensors that differ from the save
before, compared bit by bit. Nothing is compressed, so the two are comparable. The cost is for a state in which
all tensors change.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from bench.measuring import rotated
from bench.report import Goal, Report
from bench.state import State, batch, sources, trained, wanted_bytes
from ckpt import Checkpointer
from ckptstore import human

SAVES = 20
RANK = 8
CONTEXT = 4
REPETITIONS = 5
GOAL = 1.05


class Adapted(nn.Module):
    """A linear layer that is frozen, and a low-rank change to it that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the base layer plus the adapter."""
        change: Tensor = self.up(self.down(x.float()))
        result: Tensor = self.base(x) + change.to(x.dtype)
        return result


def adapt(state: State) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Freeze a model, and give it adapters."""
    model = state.model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model, torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)


def tensors(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of a save, by name."""
    found = dict(model.state_dict())
    for name, weight in model.named_parameters():
        found |= {f"{name}/{key}": value for key, value in optim.state.get(weight, {}).items()}
    return found


def changes(model: nn.Module, optim: torch.optim.Optimizer) -> Iterator[int]:
    """Counts the raw bytes that changed since the last call; all bytes at the first call."""
    before: dict[str, Tensor] = {}
    while True:
        now = tensors(model, optim)
        changed = [name for name, value in now.items() if name not in before or not torch.equal(before[name], value)]
        before |= {name: now[name].clone() for name in changed}
        yield sum(now[name].nbytes for name in changed)


def measure(quick: bool) -> Report:
    """On a folder of the default temporary file system."""
    num_bytes = wanted_bytes(quick)
    model, optim = adapt(trained("bf16", num_bytes))
    state_bytes, stored, changed, again = _adapters(model, optim)
    costs = _cost(num_bytes // 2)
    cost = {name: median(found) for name, found in costs.items()}
    rows = [
        ("changed bytes of all saves", human.size(changed), "1.00"),
        ("stored by them, with all documents", human.size(stored), f"{stored / changed:.3f}"),
        ("states themselves", human.size(SAVES * state_bytes), f"{SAVES * state_bytes / changed:.2f}"),
        ("stored by one more save of the same", human.size(again), ""),
        ("saver, all changes, incremental=True", f"{cost['True']:.3f} core-s/GB", ""),
        ("saver, all changes, max_references=0", f"{cost['False']:.3f} core-s/GB", ""),
    ]
    return Report(
        bench="references",
        what=f"{SAVES} saves of a frozen model of {state_bytes / 1e6:.0f} MB with adapters of rank {RANK}",
        columns=("", "bytes", "/ changed"),
        rows=rows,
        goals=[Goal("stored", "changed bytes", stored / changed, GOAL, "at most")],
        state_bytes=state_bytes,
        facts={
            "stored_bytes": stored,
            "changed_bytes": changed,
            "repeated_bytes": again,
            "core_s_per_gb": cost["True"],
            "core_s_per_gb_without": cost["False"],
        },
    )


def _adapters(model: nn.Module, optim: torch.optim.Optimizer) -> tuple[int, int, int, int]:
    """Sizes of the state, of all stored bytes, of the changed tensors, and of a save without changes."""
    text, asked, changed = sources(), changes(model, optim), 0
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder, run="bench", slots=1, compress="off") as checkpointer:
            for step in range(SAVES):
                _train(model, optim, batch(text, 1, CONTEXT))
                checkpointer.save(model, optim, step)
                changed += next(asked)
            stored = _size(folder)
            checkpointer.save(model, optim, SAVES)
            again = _size(folder) - stored
            _check(checkpointer, model, optim)
        return sum(tensor.nbytes for tensor in tensors(model, optim).values()), stored, changed, again


def _train(model: Any, optim: torch.optim.Optimizer, tokens: Tensor) -> None:
    model.loss(tokens).backward()
    optim.step()
    optim.zero_grad()


def _check(checkpointer: Checkpointer, model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """The restored state equals the saved one, bit by bit."""
    saved = {name: tensor.clone() for name, tensor in tensors(model, optim).items()}
    with torch.no_grad():
        for tensor in tensors(model, optim).values():
            tensor.fill_(3)
    checkpointer.restore(model, optim)
    if not all(torch.equal(tensor, saved[name]) for name, tensor in tensors(model, optim).items()):
        raise AssertionError("the restored state differs from the saved one")


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _cost(num_bytes: int) -> dict[str, list[float]]:
    """Core-seconds per GB of the saver for states in which all tensors change, in turns, after a first save."""
    model = nn.ParameterDict({str(n): torch.randn(num_bytes // 16) for n in range(4)})
    found: dict[str, list[float]] = {"True": [], "False": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, run="True", slots=1, compress="fast") as with_them,
    ):
        without = Checkpointer(folder, run="False", slots=1, compress="fast", max_references=0)
        with without:
            savers: dict[str, Callable[[int], float]] = {
                name: _saver(checkpointer, model) for name, checkpointer in (("True", with_them), ("False", without))
            }
            for step in range(REPETITIONS + 1):
                for name in rotated(list(savers), step):
                    taken = savers[name](step)
                    if step:
                        found[name].append(taken / (num_bytes / 1e9))
    return found


def _saver(checkpointer: Checkpointer, model: nn.ParameterDict) -> Callable[[int], float]:
    def save(step: int) -> float:
        with torch.no_grad():
            for weight in model.values():
                weight.mul_(1.001)
        handle = checkpointer.save_async(model, None, step)
        handle.result()
        return handle.timings.cpu_s

    return save
