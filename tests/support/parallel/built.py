"""What a layout builds, and what every layout builds it from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer

from tests.support.parallel.model import TOKENS, Part, Shape, Transformer, matrices

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.")


@dataclass(frozen=True, slots=True)
class Setup:
    """The same for all layouts. With two optimizers, the matrices have one of their own."""

    shape: Shape = field(default_factory=Shape)
    seed: int = 0
    two_optimizers: bool = False

    def model(self) -> Transformer:
        """The whole model, not yet in any layout."""
        return Transformer(self.shape, Part.whole(self.shape), self.seed)


@dataclass(frozen=True, slots=True)
class Built:
    """A model in a layout, ready to train: on this rank these chunks and these optimizers."""

    chunks: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    train_step: Callable[[int], float]
    """Train on the batch of a step; returns the mean loss of the global batch, the same on every rank."""

    @property
    def model(self) -> nn.Module | list[nn.Module]:
        """As a user would hand it to a checkpointer: one module, or the chunks of this rank."""
        return self.chunks[0] if len(self.chunks) == 1 else list(self.chunks)

    @property
    def optim(self) -> Optimizer | list[Optimizer]:
        """As a user would hand it over."""
        return self.optimizers[0] if len(self.optimizers) == 1 else list(self.optimizers)


class MakesOptimizer(Protocol):
    """An optimizer class, or something that wraps one."""

    def __call__(self, parameters: list[Tensor], kind: Any, **options: Any) -> Optimizer: ...


def canonical(name: str) -> str:
    """The name a parameter has in the model without wrappers. The model itself uses none of these words."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def optimizers(setup: Setup, chunks: Iterable[nn.Module], make: MakesOptimizer | None = None) -> list[Optimizer]:
    """AdamW for everything; or AdamW for the matrices and SGD with momentum for the rest."""
    make = make or (lambda parameters, kind, **options: kind(parameters, **options))
    names: dict[Tensor, str] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                names.setdefault(parameter, canonical(name))  # chunks may share one
    if not setup.two_optimizers:
        return [make(list(names), AdamW, lr=1e-2)]
    large = matrices(setup.shape)
    return [
        make([parameter for parameter, name in names.items() if name in large], AdamW, lr=1e-2),
        make([parameter for parameter, name in names.items() if name not in large], SGD, lr=1e-1, momentum=0.9),
    ]


def finish_step(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def data_parallel(
    setup: Setup,
    model: nn.Module,
    optimizers: list[Optimizer],
    part: int = 0,
    parts: int = 1,
    group: dist.ProcessGroup | None = None,
    reduce: Callable[[], None] = lambda: None,
) -> Built:
    """A model that trains on one of `parts` parts of each batch; `reduce` does what its wrapper leaves undone."""

    def train_step(step: int) -> float:
        tokens, targets = batch(setup.shape, step, part, parts)
        loss = cross_entropy(model(tokens), targets)
        torch.autograd.backward(loss)
        reduce()
        finish_step(optimizers)
        return mean(loss, parts, group)

    return Built([model], optimizers, train_step)


def mean(loss: Tensor, parts: int, group: dist.ProcessGroup | None = None) -> float:
    total = loss.detach().clone()
    if parts > 1:
        dist.all_reduce(total, group=group)
    return float(total / parts)


def average_gradients(parameters: Iterable[Tensor], parts: int, group: dist.ProcessGroup | None = None) -> None:
    """What DistributedDataParallel does, by hand; sharded gradients are averaged shard by shard."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
            dist.all_reduce(gradient, group=group)
            gradient /= parts


def seeded() -> None:
    """Nothing here draws random numbers, yet the state of the generators is part of what is saved."""
    torch.manual_seed(1234 + (dist.get_rank() if dist.is_initialized() else 0))


SEQUENCES = 8


def batch(shape: Shape, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one of `parts` equal parts of the batch of a step."""
    generator = torch.Generator().manual_seed(7919 * step + 1)
    own = torch.randint(shape.vocabulary, (SEQUENCES, TOKENS + 1), generator=generator).tensor_split(parts)[part]
    return own[:, :-1], own[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of this part; the mean of equal parts is the mean of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
