"""The kinds of tensors in a trained state, each as one long run of bytes, on which codecs are measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench.state import State

FIELDS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of exponent and mantissa."""
NAMES = {"weight": "weights", "exp_avg": "m", "exp_avg_sq": "v"}


@dataclass(frozen=True, slots=True)
class Kind:
    """All tensors of one kind and type, one after the other."""

    name: str
    dtype: str
    raw: memoryview

    @property
    def bound(self) -> float:
        """The order-0 entropy bound, as a share of the raw size.

        For each number: the entropy of its exponent and that of its sign, both over all numbers of the kind, and all
        bits of its mantissa. A codec that adapts to the scale of each block may be below it.
        """
        exponent, mantissa = FIELDS[self.dtype]
        bits = 1 + exponent + mantissa
        words: npt.NDArray[np.int64] = np.frombuffer(self.raw, f"u{bits // 8}").astype(np.int64)
        fields = (words >> mantissa) & ((1 << exponent) - 1), words >> (bits - 1)
        return (sum(map(_entropy, fields)) + mantissa) / bits


def kinds(state: State, most_bytes: int) -> list[Kind]:
    """Kinds of a float32 state: weights and moments; and the weights as 16-bit types. Each is cut at a maximum size."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in state.tensors().items():
        key = "weight" if name.startswith("model/") else name.rpartition("/")[2]
        if key in NAMES:
            found.setdefault(key, []).append(tensor.detach().flatten())
    joined = {key: torch.cat(tensors)[: most_bytes // 4].contiguous() for key, tensors in found.items()}
    floats = [Kind(NAMES[key], "float32", _bytes(tensor)) for key, tensor in joined.items()]
    halves = [Kind("weights", dtype, _bytes(joined["weight"].to(getattr(torch, dtype)))) for dtype in FIELDS]
    return floats + halves[1:]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().data)


def _entropy(values: npt.NDArray[Any]) -> float:
    counts = np.bincount(values)
    shares = counts[counts > 0] / len(values)
    return -math.fsum((shares * np.log2(shares)).tolist())
