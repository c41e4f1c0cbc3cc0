"""python -m bench.gpu [--gigabytes N] [--batch N]: saves and restores against the GPU's link to host memory.

Writes bench/results/gpu-NAME.json. The store is a folder in shared memory if there is enough, so no disk is measured;
the other benchmarks measure durability.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from bench import machine
from bench.__main__ import show
from bench.gpt import GPT
from bench.report import Goal, Report
from ckpt import Checkpointer
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import open_store

REPETITIONS = 5
DIM, CONTEXT = 2048, 512
BATCH = 64
"""Tokens of a step in proportion to the state, as in a real training: a step of a few samples would be over before any
copy of the state could be."""
_MOST_STEPS = 50
BLOCK_BYTES = 12 * 12 * DIM * DIM
"""Weights and moments of one block."""
RESULTS = Path(__file__).parent / "results"


class Training:
    """A GPT and its optimizer on the GPU, and one step."""

    def __init__(self, num_bytes: int, batch: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = GPT(DIM, max(1, round(num_bytes / BLOCK_BYTES)), CONTEXT)
            self.tokens = torch.randint(0, 256, (batch, CONTEXT + 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()

    def step(self) -> None:
        """Enqueued; nothing waits for it."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.model.loss(self.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optim.step()
        self.optim.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        """The live ones."""
        moments = [value for state in self.optim.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *(each for each in moments if isinstance(each, torch.Tensor))]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())


def main() -> None:
    """Run the benchmark, or exit with the reason."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.5, help="of weights and moments")
    parser.add_argument("--batch", type=int, default=BATCH, help=f"sequences of {CONTEXT} bytes in a step")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch finds none")
    report = measure(int(args.gigabytes * 1e9), args.batch)
    show(report)
    name = torch.cuda.get_device_name()
    where = {"gpu": name, "cuda": torch.version.cuda, "machine": machine.describe(), "versions": machine.versions()}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.json"
    path.write_text(json.dumps(report.verdict() | where) + "\n")
    print(path)


def measure(num_bytes: int, batch: int) -> Report:
    """Run all measurements, in a few minutes."""
    training = Training(num_bytes, batch)
    num_bytes = training.num_bytes
    down, up = _bandwidth(num_bytes)
    with tempfile.TemporaryDirectory(dir=_folder(num_bytes)) as folder:
        eager = _saves(training, f"{folder}/eager", overlap=False)
        overlap = _saves(training, f"{folder}/overlap", overlap=True)
        restore_s, exact = _restores(training, f"{folder}/restore")
    seconds = {name: median(values) for name, values in {**eager, **overlap}.items()}
    slowdown = seconds["overlap, step"] / seconds["overlap, step without"]
    return Report(
        bench="gpu",
        what=f"{num_bytes / 1e9:.1f} GB on {torch.cuda.get_device_name()}, median of {REPETITIONS}",
        columns=("", "s", "GB/s"),
        rows=[
            ("pinned copy to host", f"{down:.4f}", f"{num_bytes / down / 1e9:.1f}"),
            ("pinned copy to GPU", f"{up:.4f}", f"{num_bytes / up / 1e9:.1f}"),
            ("save_async, overlap=False", f"{seconds['eager, stall']:.4f}", _rate(num_bytes, seconds["eager, stall"])),
            ("save_async", f"{seconds['overlap, stall']:.5f}", ""),
            ("mean step while saving", f"{seconds['overlap, step']:.4f}", ""),
            ("mean step without a save", f"{seconds['overlap, step without']:.4f}", ""),
            ("warm restore", f"{restore_s:.4f}", _rate(num_bytes, restore_s)),
        ],
        goals=[
            Goal("overlap stall", "5 ms", seconds["overlap, stall"] / 0.005, 1.0, "at most"),
            Goal("eager", "pinned copy to host", down / seconds["eager, stall"], 0.9, "at least"),
            Goal("step while saving", "step without", slowdown, 1.03, "at most"),
            Goal("warm restore", "pinned copy to GPU", up / restore_s, 0.8, "at least"),
            Goal("bit-exact restores", "all", float(exact), 1.0, "at least"),
        ],
        limit=down,
        state_bytes=num_bytes,
        facts={**seconds, "copy_to_host_s": down, "copy_to_gpu_s": up, "restore_s": restore_s},
    )


def _rate(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e9:.1f}"


def _folder(num_bytes: int) -> str | None:
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 3 * num_bytes
    return str(shared) if roomy else None


def _bandwidth(num_bytes: int) -> tuple[float, float]:
    """Seconds to copy this number of bytes out of the GPU and into it, through one pinned buffer of a gigabyte."""
    size = min(num_bytes, 1 << 30)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    down = [_waited(lambda: host.copy_(device, non_blocking=True)) for _ in range(1 + REPETITIONS)]
    up = [_waited(lambda: device.copy_(host, non_blocking=True)) for _ in range(1 + REPETITIONS)]
    return median(down[1:]) * num_bytes / size, median(up[1:]) * num_bytes / size


def _waited(call: Callable[[], object]) -> float:
    """Seconds until the GPU has finished a call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _saves(training: Training, store: str, overlap: bool) -> dict[str, list[float]]:
    """Stalls; and steps while a save is under way, each round next to as many without one."""
    name = "overlap" if overlap else "eager"
    found: dict[str, list[float]] = {f"{name}, stall": [], f"{name}, step": [], f"{name}, step without": []}
    with Checkpointer(store, run="gpu", overlap=overlap, slots=1, compress="off", incremental=False) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        for round_ in range(1 + REPETITIONS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            handle = checkpointer.save_async(training.model, training.optim, round_)
            stall = time.perf_counter() - began
            steps = 0
            began = time.perf_counter()
            while not handle.done() or not steps:
                training.step()
                torch.cuda.synchronize()
                steps += 1
            with_save = (time.perf_counter() - began) / steps
            delete_checkpoint(Run(open_store(store), handle.result().run), handle.result().attempt, "bench", force=True)
            without = fmean(_waited(training.step) for _ in range(min(steps, _MOST_STEPS)))
            if round_:  # the first pins memory, and does not overlap
                for key, value in zip(found, (stall, with_save, without), strict=True):
                    found[key].append(value)
    return found


def _restores(training: Training, store: str) -> tuple[float, bool]:
    """Seconds of a restore from memory, and whether every bit came back each time."""
    seconds, exact = [], True
    with Checkpointer(store, run="gpu", slots=1, compress="off") as checkpointer:
        checkpoint = checkpointer.save(training.model, training.optim, 0)
        want = [tensor.detach().clone() for tensor in training.tensors()]
        for _ in range(1 + REPETITIONS):
            for tensor in training.tensors():
                tensor.detach().zero_()
            seconds.append(
                _waited(lambda: checkpointer.restore(training.model, training.optim, checkpoint=checkpoint.id))
            )
            found: list[Any] = training.tensors()
            exact &= all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    return median(seconds[1:]), exact


if __name__ == "__main__":
    main()
