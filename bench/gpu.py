"""python -m bench.gpu [--gigabytes N] [--batch N]: saves and restores against the GPU's link to host memory.

Writes bench/results/gpu-NAME.json. The store is a folder in shared memory if there is enough, so no disk is measured;
the other benchmarks measure durability. The report names the folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from bench import machine
from bench.__main__ import show
from bench.gpt import GPT
from bench.gpu_device import Gpu, Stamp, launching
from bench.report import Goal, Report
from ckpt import Checkpointer, SaveHandle
from ckpt.device import DEVICES
from ckpt.host.segment import Segment, populate
from ckpt.snapshot.device_copies import pin_segment
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import open_store

RESULTS = Path(__file__).parent / "results"
_STATE_PER_PARAMETER = 4
"""Leaves of a parameter with the fused AdamW: itself, two moments and the step."""

Seconds = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    num_bytes: int
    """Bytes of weights and moments."""
    batch: int = 64
    """Tokens of a step in proportion to the state, as in a real training: a step of a few samples would be over before
    any copy of the state could be."""
    dim: int = 2048
    context: int = 512
    repetitions: int = 5
    leaves: tuple[int, ...] = (1268, 10_000)
    busy_s: float = 0.2
    """How long the GPU is busy at a save of many leaves."""
    pinned_bytes: int = 4 << 30
    """The memory that is pinned beside the second process."""
    most_steps: int = 50


class Training:
    """A GPT and its optimizer on the GPU, and one step."""

    def __init__(self, gpu: Gpu, scale: Scale) -> None:
        torch.manual_seed(0)
        block_bytes = 12 * 12 * scale.dim * scale.dim  # weights and moments
        with gpu.device:
            self.model = GPT(scale.dim, max(1, round(scale.num_bytes / block_bytes)), scale.context)
            self.tokens = torch.randint(0, 256, (scale.batch, scale.context + 1))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._gpu = gpu
        self.before_gate: Stamp | None = None
        self.after_gate: Stamp | None = None
        self.optim.register_step_pre_hook(self._pass_gate)
        self.step()

    def step(self) -> None:
        """Enqueued; nothing waits for it."""
        with torch.autocast(self._gpu.device.type, dtype=torch.bfloat16):
            loss = self.model.loss(self.tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        self.before_gate = self._gpu.stamp()
        self.optim.step()
        self.optim.zero_grad()

    def timed_step(self) -> tuple[float, float]:
        """Seconds that the GPU takes for a step, and that it waits at the gate in it."""
        began = self._gpu.stamp()
        self.step()
        ended = self._gpu.stamp()
        assert self.before_gate is not None
        assert self.after_gate is not None
        return began.seconds_until(ended), self.before_gate.seconds_until(self.after_gate)

    def tensors(self) -> list[torch.Tensor]:
        """The live ones."""
        moments = [value for state in self.optim.state.values() for value in state.values()]
        return [*self.model.state_dict().values(), *(each for each in moments if isinstance(each, torch.Tensor))]

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def _pass_gate(self, *_: object) -> None:
        # Hooks of optimizers run after those of all optimizers, of which the gate is one.
        self.after_gate = self._gpu.stamp()


def main() -> None:
    """Run the benchmark, or exit with the reason."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8.5, help="of weights and moments")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 512 bytes in a step")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device, and torch finds none")
    gpu = Gpu()
    report = measure(gpu, Scale(int(args.gigabytes * 1e9), args.batch))
    show(report)
    where = {"gpu": gpu.name, "cuda": torch.version.cuda, "machine": machine.describe(), "versions": machine.versions()}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', gpu.name.lower()).strip('-')}.json"
    path.write_text(json.dumps(report.verdict() | where) + "\n")
    print(path)


def measure(gpu: Gpu, scale: Scale) -> Report:
    """Run all measurements, in a few minutes."""
    training = Training(gpu, scale)
    num_bytes = training.num_bytes
    down, up = _bandwidth(gpu, scale, num_bytes)
    parent = _folder(num_bytes)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        found = _saves(gpu, scale, training, f"{folder}/eager", overlap=False)
        found |= _saves(gpu, scale, training, f"{folder}/overlap", overlap=True)
        for leaves in scale.leaves:
            found |= _busy_stalls(gpu, scale, leaves, f"{folder}/leaves-{leaves}")
        found |= _pinning(gpu, scale)
        restored, exact = _restores(gpu, scale, training, f"{folder}/restore")
        found |= restored
        where = f"{Path(folder).parent} ({shutil.disk_usage(folder).free / 1e9:.0f} GB free)"
    seconds = {name: median(values) for name, values in found.items()}
    return _report(gpu, scale, num_bytes, seconds | {"copy to host": down, "copy to GPU": up}, exact, where)


def _report(gpu: Gpu, scale: Scale, num_bytes: int, seconds: dict[str, float], exact: bool, where: str) -> Report:
    def row(label: str, name: str, rate: bool = False) -> tuple[str, str, str]:
        return label, f"{seconds[name]:.5f}", f"{num_bytes / seconds[name] / 1e9:.1f}" if rate else ""

    slowdown = seconds["overlap, step"] / seconds["overlap, step without"]
    return Report(
        bench="gpu",
        what=f"{num_bytes / 1e9:.1f} GB on {gpu.name}, median of {scale.repetitions}, store in {where}",
        columns=("", "s", "GB/s"),
        rows=[
            row("pinned copy to host", "copy to host", rate=True),
            row("pinned copy to GPU", "copy to GPU", rate=True),
            row("save_async, overlap=False", "eager, stall", rate=True),
            row("save_async", "overlap, stall"),
            *(row(f"save_async, GPU busy, {n} leaves", f"busy, {n} leaves") for n in scale.leaves),
            row("first step beside the copy, on the GPU", "overlap, first step"),
            row("later steps while saving, on the GPU", "overlap, step"),
            row("step without a save, on the GPU", "overlap, step without"),
            row("wait of the GPU at the gate", "overlap, gate"),
            row(f"pinning {scale.pinned_bytes / 1e9:.1f} GB", "pinning"),
            row("longest pause of a second process meanwhile", "pinning, pause"),
            row("its longest pause without", "pinning, pause without"),
            row("reading the shards from the page cache", "read", rate=True),
            row("warm restore", "restore", rate=True),
        ],
        goals=[
            Goal("overlap stall", "5 ms", seconds["overlap, stall"] / 0.005, 1.0, "at most"),
            Goal("eager", "pinned copy to host", seconds["copy to host"] / seconds["eager, stall"], 0.9, "at least"),
            Goal("step while saving", "step without", slowdown, 1.03, "at most"),
            Goal("warm restore", "pinned copy to GPU", seconds["copy to GPU"] / seconds["restore"], 0.8, "at least"),
            Goal("warm restore", "page cache", seconds["read"] / seconds["restore"], 0.8, "at least"),
            Goal("bit-exact restores", "all", float(exact), 1.0, "at least"),
        ],
        limit=seconds["copy to host"],
        state_bytes=num_bytes,
        facts={**seconds, "folder": where},
    )


def _folder(num_bytes: int) -> str | None:
    shared = Path("/dev/shm")
    roomy = shared.is_dir() and shutil.disk_usage(shared).free > 3 * num_bytes
    return str(shared) if roomy else None


def _bandwidth(gpu: Gpu, scale: Scale, num_bytes: int) -> tuple[float, float]:
    """Seconds to copy this number of bytes out of the GPU and into it, through one pinned buffer of a gigabyte."""
    size = min(num_bytes, 1 << 30)
    host, device = gpu.pinned(size), torch.empty(size, dtype=torch.uint8, device=gpu.device)
    down = [_waited(gpu, lambda: host.copy_(device, non_blocking=True)) for _ in range(1 + scale.repetitions)]
    up = [_waited(gpu, lambda: device.copy_(host, non_blocking=True)) for _ in range(1 + scale.repetitions)]
    return median(down[1:]) * num_bytes / size, median(up[1:]) * num_bytes / size


def _waited(gpu: Gpu, call: Callable[[], object]) -> float:
    """Seconds until the GPU has finished a call."""
    gpu.synchronize()
    began = time.perf_counter()
    call()
    gpu.synchronize()
    return time.perf_counter() - began


def _saves(gpu: Gpu, scale: Scale, training: Training, store: str, overlap: bool) -> Seconds:
    """Stalls; and steps while a save is under way, each round next to as many without one."""
    found: Seconds = defaultdict(list)
    name = "overlap" if overlap else "eager"
    with Checkpointer(store, run="gpu", overlap=overlap, slots=1, compress="off", max_references=0) as checkpointer:
        checkpointer.prepare(training.model, training.optim)
        training.step()
        for round_ in range(3 + scale.repetitions):
            gpu.synchronize()
            began = time.perf_counter()
            handle = checkpointer.save_async(training.model, training.optim, round_)
            stall = time.perf_counter() - began
            beside = {"stall": stall} | (_steps_beside(scale, training, handle) if overlap else {})
            delete_checkpoint(Run(open_store(store), handle.result().run), handle.result().attempt, "bench", force=True)
            if round_ >= 3:  # the first ones fill caches of memory, and are watched more closely
                for key, value in beside.items():
                    found[f"{name}, {key}"].append(value)
    return dict(found)


def _steps_beside(scale: Scale, training: Training, handle: SaveHandle) -> dict[str, float]:
    """Seconds of the GPU until a save has ended, and for as many steps without one."""
    first, gate = training.timed_step()
    later = [training.timed_step()[0]]
    while not handle.done():
        later.append(training.timed_step()[0])
    without = fmean(training.timed_step()[0] for _ in later[: scale.most_steps])
    return {"first step": first, "gate": gate, "step": fmean(later), "step without": without}


def _busy_stalls(gpu: Gpu, scale: Scale, num_leaves: int, store: str) -> Seconds:
    """Stalls of saves of many small leaves, of which the GPU has not computed the state yet."""
    count = max(1, num_leaves // _STATE_PER_PARAMETER)
    model = nn.ParameterList(nn.Parameter(torch.ones(1024, device=gpu.device)) for _ in range(count))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stalls = []
    with Checkpointer(store, run="gpu", slots=2, compress="off", max_references=0) as checkpointer:
        checkpointer.prepare(model, optim)
        for round_ in range(3 + scale.repetitions):
            for parameter in model:
                parameter.grad = torch.ones_like(parameter)
            optim.step()
            gpu.occupy(scale.busy_s)
            began = time.perf_counter()
            handle = checkpointer.save_async(model, optim, round_)
            stalls.append(time.perf_counter() - began)
            handle.result()
    return {f"busy, {num_leaves} leaves": stalls[3:]}


def _pinning(gpu: Gpu, scale: Scale) -> Seconds:
    """Seconds to pin a slot, and the longest pause of a second process that launches, with and without that."""
    segment = Segment(scale.pinned_bytes)
    try:
        populate(segment)
        with launching(gpu.device) as alone:
            time.sleep(1.0)
        with launching(gpu.device) as beside:
            began = time.perf_counter()
            pin_segment(segment, DEVICES[gpu.device.type](gpu.device))
            took = time.perf_counter() - began
        return {"pinning": [took], "pinning, pause": [beside.pause_s], "pinning, pause without": [alone.pause_s]}
    finally:
        segment.close()


def _restores(gpu: Gpu, scale: Scale, training: Training, store: str) -> tuple[Seconds, bool]:
    """Seconds of restores from memory and of reads of the shards, and whether every bit came back each time."""
    seconds, reads, exact = [], [], True
    with Checkpointer(store, run="gpu", slots=1, compress="off") as checkpointer:
        checkpoint = checkpointer.save(training.model, training.optim, 0)
        want = [tensor.detach().clone() for tensor in training.tensors()]
        for _ in range(1 + scale.repetitions):
            for tensor in training.tensors():
                tensor.detach().zero_()
            seconds.append(
                _waited(gpu, lambda: checkpointer.restore(training.model, training.optim, checkpoint=checkpoint.id))
            )
            found: list[Any] = training.tensors()
            exact &= all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
            reads.append(_read(Path(store)))
    return {"restore": seconds[1:], "read": reads[1:]}, exact


def _read(store: Path) -> float:
    """Seconds to read all shards with one thread, into memory that is used again."""
    buffer = bytearray(16 << 20)
    began = time.perf_counter()
    for path in store.rglob("*.ckpt"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
