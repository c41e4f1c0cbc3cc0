"""Published weights: bytes per update beside the order-0 bound of the XOR, and beside indices with new values.

A trained GPT goes on with Adam at the learning rate of reinforcement learning, and publishes its weights in bfloat16
every step, or every tenth. Stored are the bytes of the shard, with statistics, of an update that is a delta; with all,
what the folder grows by per update, with documents and whole chunks. The bound is the order-0 entropy of each byte
plane of the XOR with the update before, over all weights. "indices and values" is what others ship: the gaps between
changed words and the new words, each byte plane compressed by the smaller of two zstd levels. Every update is read back
and compared bit by bit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard

import ckpt
from bench.report import Goal, Report
from bench.state import State, batch, sources, trained, wanted_bytes
from ckpt import Checkpointer

GAPS = (1, 10)
UPDATES = 6
LEARNING_RATE = 3e-6
CONTEXT = 16

Words = np.ndarray[Any, np.dtype[np.uint16]]


def words(state: State) -> Words:
    """The weights as they are published, as 16-bit words in one row."""
    found = [tensor.detach().to(torch.bfloat16).reshape(-1) for tensor in state.model.parameters()]
    return np.asarray(torch.cat(found).view(torch.int16).numpy().view(np.uint16))


def bound(before: Words, now: Words) -> float:
    """Bytes that an order-0 coder of the byte planes of the XOR needs."""
    planes = (before ^ now).view(np.uint8).reshape(-1, 2)
    total = 0.0
    for plane in range(2):
        counts = np.bincount(planes[:, plane], minlength=256)
        shares = counts[counts > 0] / len(planes)
        total -= float((shares * np.log2(shares)).sum()) * len(planes) / 8
    return total


def indices_and_values(before: Words, now: Words) -> int:
    """Bytes of the gaps between words that changed, and of their new values."""
    changed = np.flatnonzero(before != now)
    gaps = np.diff(changed, prepend=-1).astype("<u4")
    planes = [*gaps.view(np.uint8).reshape(-1, 4).T, *now[changed].view(np.uint8).reshape(-1, 2).T]
    return sum(min(len(zstandard.compress(plane.tobytes(), level)) for level in (3, 9)) for plane in planes)


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system."""
    rows, goals, facts = list[tuple[str, ...]](), list[Goal](), dict[str, float]()
    num_bytes = 0
    for gap in GAPS:
        state = trained("fp32", wanted_bytes(quick))
        stored, everything, limit, others = _publish(state, gap)
        num_bytes = 2 * len(words(state))
        shares = [figure / num_bytes for figure in (stored, everything, limit, others)]
        rows.append((f"every {gap} steps", *(f"{100 * share:.2f} %" for share in shares)))
        goals.append(Goal(f"update, gap {gap}", "indices and values", stored / others, 1.0, "at most"))
        goals.append(Goal(f"update, gap {gap}", "order-0 bound of the XOR", stored / limit, 1.05, "at most"))
        facts[f"share_{gap}"], facts[f"share_of_all_{gap}"] = shares[:2]
    return Report(
        bench="deltas",
        what=f"updates of {num_bytes / 1e6:.0f} MB of bfloat16 at a learning rate of {LEARNING_RATE:g}",
        columns=("published", "stored / raw", "with all", "order-0 bound", "indices and values"),
        rows=rows,
        goals=goals,
        state_bytes=num_bytes,
        facts=facts,
    )


def _publish(state: State, gap: int) -> tuple[float, float, float, float]:
    """Mean bytes per update: of the shard, of the folder, of the bound, and of indices with values."""
    optim, text = state.optim, sources()
    assert optim is not None
    for group in optim.param_groups:
        group["lr"] = LEARNING_RATE
    stored, limit, others = 0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        with Checkpointer(folder, run="bench", slots=1, compress="fast") as checkpointer:
            checkpointer.publish(state.model, 0).result()
            first, before = _size(folder), words(state)
            for step in range(1, UPDATES + 1):
                for _ in range(gap):
                    _train(state.model, optim, batch(text, 1, CONTEXT))
                handle = checkpointer.publish(state.model, step)
                handle.result()
                now = words(state)
                stored += handle.timings.stored_bytes
                limit, others = limit + bound(before, now), others + indices_and_values(before, now)
                before = now
            everything = _size(folder) - first
        _check(folder, state)
    return stored / UPDATES, everything / UPDATES, limit / UPDATES, others / UPDATES


def _train(model: Any, optim: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    model.loss(tokens).backward()
    optim.step()
    optim.zero_grad()


@torch.no_grad()
def _check(folder: str, state: State) -> None:
    """The last update reads as it was published, bit by bit."""
    found = ckpt.load(f"{folder}/bench~weights@{UPDATES}")
    for name, tensor in state.model.named_parameters():
        if not torch.equal(found[f"model/{name}"].view(torch.int16), tensor.bfloat16().view(torch.int16)):
            raise AssertionError(f"{name} differs from what was published")


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
