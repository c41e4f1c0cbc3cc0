"""Batches by step: the global batch of a step is the same however many ranks share it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.parallel.model import TOKENS, Shape

SEQUENCES = 8


def batch(shape: Shape, step: int, part: int = 0, parts: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and targets of one of `parts` equal parts of the batch of a step."""
    generator = torch.Generator().manual_seed(7919 * step + 1)
    tokens = torch.randint(shape.vocabulary, (SEQUENCES, TOKENS + 1), generator=generator)
    own = tokens.chunk(parts)[part]
    return own[:, :-1], own[:, 1:]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the tokens of this part; the mean of equal parts is the mean of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
