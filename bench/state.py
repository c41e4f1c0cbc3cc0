"""A trained state: a small GPT on the sources of the standard library, tiled to the required size.

Random numbers are no substitute: the result of a codec depends on the trained values. The training takes less than a
minute of one core and is kept in the user's cache folder. A tiled model repeats the trained blocks, with their
moments, each copy slightly rotated so that no two tensors are equal; one period is larger than the window of any
codec that is measured here.
"""

from __future__ import annotations

import math
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
import xxhash
from torch import Tensor

from bench.gpt import GPT, MasterAdamW

Kind = Literal["fp32", "bf16", "mixed"]
"""fp32: weights and AdamW's moments, 12 bytes per parameter. bf16: weights alone, 2 bytes. mixed: bfloat16 weights that
are casts of float32 masters, masters and moments, 14 bytes."""
BYTES_PER_PARAMETER: dict[Kind, int] = {"fp32": 12, "bf16": 2, "mixed": 14}
VERSION = 1
"""Version of the training: another one is another file in the cache."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the model, and length of the training."""

    dim: int = 512
    blocks: int = 2
    context: int = 64
    batch: int = 4
    steps: int = 200


SMALL = "CKPT_BENCH_SMALL"
"""Environment variable: if it is set, all is small, to test the benchmarks themselves."""


def shape() -> Shape:
    """The state that benchmarks train."""
    return Shape(dim=64, steps=20) if os.environ.get(SMALL) else Shape()


def wanted_bytes(quick: bool) -> int:
    """The default size of a state in bytes."""
    if os.environ.get(SMALL):
        return 4_000_000
    return 200_000_000 if quick else 1_000_000_000


@dataclass(frozen=True, slots=True)
class State:
    """A model and its optimizer, as a trainer has them."""

    kind: Kind
    model: GPT
    optim: torch.optim.Optimizer | None

    def tensors(self) -> dict[str, Tensor]:
        """All of them, the live ones, by name: model/NAME, optim/NAME/exp_avg."""
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.optim is not None:
            for name, weight in self.model.named_parameters():
                found |= {f"optim/{name}/{key}": tensor for key, tensor in self.optim.state[weight].items()}
        return found

    def tree(self) -> dict[str, Any]:
        """The state dicts, as users save them."""
        tree = {"model": self.model.state_dict()}
        return tree if self.optim is None else tree | {"optim": self.optim.state_dict()}

    @property
    def num_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def digest(self) -> str:
        """Digest of the whole state, to compare after a restore."""
        digest = xxhash.xxh3_128()
        for name, tensor in sorted(self.tensors().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @torch.no_grad()
    def forget(self) -> None:
        """Overwrite all numbers, so that a restore that does nothing is noticed."""
        for tensor in self.tensors().values():
            tensor.fill_(math.pi)


def trained(kind: Kind, num_bytes: int) -> State:
    """A state of about this size; at least one block."""
    period = _trained(shape())
    sizes = {name: tensor.numel() for name, tensor in period.items() if name.startswith("weight/")}
    in_block = sum(size for name, size in sizes.items() if "blocks.0." in name)
    beside = sum(size for name, size in sizes.items() if "blocks." not in name)
    blocks = max(1, round((num_bytes / BYTES_PER_PARAMETER[kind] - beside) / in_block))
    return _tiled(kind, blocks, period)


def _tiled(kind: Kind, blocks: int, period: dict[str, Tensor]) -> State:
    size = shape()
    with torch.random.fork_rng(devices=[]):
        model = GPT(size.dim, blocks, size.context)
    if kind != "fp32":
        model.bfloat16()
    optim: torch.optim.Optimizer | None = None
    if kind == "fp32":
        optim = torch.optim.AdamW(model.parameters(), fused=True)
    elif kind == "mixed":
        optim = MasterAdamW(model.parameters())
    for name, weight in model.named_parameters():
        numbers = _numbers_of(name, size.blocks, period)
        with torch.no_grad():
            weight.copy_(numbers["weight"])
        if optim is not None:
            state = {"step": torch.tensor(float(size.steps)), **{moment: numbers[moment] for moment in MOMENTS}}
            optim.state[weight] = state | ({"master": numbers["weight"]} if kind == "mixed" else {})
    return State(kind, model, optim)


def _numbers_of(name: str, blocks: int, period: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weight and moments of one parameter: blocks.7.x of two blocks is blocks.1.x, slightly rotated.

    Rotated, because a library that stores equal tensors once would otherwise store almost nothing.
    """
    head, *rest = name.split(".")
    copy = 0
    if head == "blocks":
        copy, number = divmod(int(rest[0]), blocks)
        name = ".".join([head, str(number), *rest[1:]])
    found = {key: period[f"{key}/{name}"] for key in ("weight", *MOMENTS)}
    return {key: tensor.flatten().roll(copy * 7919).view_as(tensor) for key, tensor in found.items()}


def _trained(size: Shape) -> dict[str, Tensor]:
    """weight/NAME, exp_avg/NAME and exp_avg_sq/NAME, from the cache if they are there."""
    key = f"{VERSION}-{size.dim}-{size.blocks}-{size.context}-{size.batch}-{size.steps}"
    path = _cache() / f"gpt-{key}-python{platform.python_version()}-torch{torch.__version__}.safetensors"
    if not path.exists():
        model, optim = train(size)
        numbers = {f"weight/{name}": weight.detach() for name, weight in model.named_parameters()}
        for moment in MOMENTS:
            numbers |= {f"{moment}/{name}": optim.state[weight][moment] for name, weight in model.named_parameters()}
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            safetensors.torch.save_file(numbers, f"{folder}/new")
            Path(folder, "new").rename(path)
    return safetensors.torch.load_file(path)


def _cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckptd-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def train(size: Shape) -> tuple[GPT, torch.optim.Optimizer]:
    """On the sources of the standard library, with one thread, the same on every machine up to its arithmetic."""
    text = sources()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(size.dim, size.blocks, size.context)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for _ in range(size.steps):
            model.loss(batch(text, size.batch, size.context)).backward()  # type: ignore[no-untyped-call]
            optim.step()
            optim.zero_grad()
    return model, optim


def sources() -> Tensor:
    """Bytes of the modules of the standard library."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batch(text: Tensor, size: int, context: int) -> Tensor:
    """Random pieces of the text, one byte longer than the context."""
    starts = torch.randint(len(text) - context - 1, (size,))
    return torch.stack([text[start : start + context + 1] for start in starts]).long()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
