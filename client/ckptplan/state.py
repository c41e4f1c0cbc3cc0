"""The bytes that each parameter costs in a checkpoint, term by term. Pure.

14 bytes are the mixed precision of Megatron and MLPerf: 16-bit weights (2), float32 master weights (4), Adam's momentum
(4) and variance (4). Gradients are in a checkpoint only if a save keeps them (`grads=True`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from ckptstore.codecs.dtypes import ITEM_BYTES
from ckptstore.errors import InvalidRequest

SHORT_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
}
COMPRESSED = {"float32": 0.835, "bfloat16": 0.67, "float16": 0.85}
"""Stored share of trained weights and moments under `compress="fast"` (docs/decisions/0016). Other types: 1."""


class Optimizer(StrEnum):
    """Optimizers, by the state that they keep for each parameter."""

    ADAMW = "adamw"
    ADAM = "adam"
    LION = "lion"
    MUON = "muon"
    SGD_MOMENTUM = "sgd-momentum"
    SGD = "sgd"
    NONE = "none"


_KEEPS: Mapping[Optimizer, tuple[str, ...]] = {
    Optimizer.ADAMW: ("momentum", "variance"),
    Optimizer.ADAM: ("momentum", "variance"),
    Optimizer.LION: ("momentum",),
    Optimizer.MUON: ("momentum",),
    Optimizer.SGD_MOMENTUM: ("momentum",),
    Optimizer.SGD: (),
    Optimizer.NONE: (),
}


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state, and its bytes per parameter in a checkpoint."""

    name: str
    """weights, master, momentum, variance, grads or other."""
    dtype: str
    """Element type; empty: not stored, or of several types."""
    bytes_per_parameter: float
    compressed: float = 1.0
    """Stored share."""

    @property
    def of_optimizer(self) -> bool:
        """Whether ZeRO 1 and 2 distribute it over the data-parallel ranks."""
        return self.name not in ("weights", "grads")


def state_terms(
    optimizer: Optimizer, weights: str, master: str | None, moments: str, grads: str | None
) -> tuple[Term, ...]:
    """All five terms; one that is not stored has 0 bytes. The names are element types; short ones are allowed.

    master None: float32 beside 16-bit weights, else none. "none": none. grads None: not saved.
    """
    of_weights = dtype_named(weights)
    if master is None:
        master = "float32" if ITEM_BYTES[of_weights] < 4 and optimizer is not Optimizer.NONE else "none"
    kept = _KEEPS[optimizer]
    return (
        _term("weights", of_weights),
        _term("master", "" if master == "none" else dtype_named(master)),
        *(_term(name, dtype_named(moments) if name in kept else "") for name in ("momentum", "variance")),
        _term("grads", dtype_named(grads) if grads else ""),
    )


def measured_terms(num_bytes: Mapping[tuple[str, str], int], parameters: int, compressed: float) -> tuple[Term, ...]:
    """The terms of a checkpoint. num_bytes: by name of the term and element type. compressed: its stored share."""
    return tuple(
        Term(name=name, dtype=dtype, bytes_per_parameter=count / parameters, compressed=compressed)
        for (name, dtype), count in num_bytes.items()
    )


def per_parameter(terms: Iterable[Term]) -> float:
    """Bytes of all terms."""
    return sum(term.bytes_per_parameter for term in terms)


def derivable(terms: Iterable[Term]) -> frozenset[str]:
    """The terms that dedup_casts leaves out: 16-bit weights that are casts of float32 masters."""
    dtypes = {term.name: term.dtype for term in terms}
    casts = dtypes.get("weights") in ("bfloat16", "float16") and dtypes.get("master") == "float32"
    return frozenset({"weights"}) if casts else frozenset()


def dtype_named(name: str) -> str:
    """The element type of a name such as bf16 or bfloat16. Raises InvalidRequest."""
    found = SHORT_NAMES.get(name, name)
    if found not in ITEM_BYTES:
        raise InvalidRequest(f"{name!r} is not an element type", f"Use {', '.join(SHORT_NAMES)} or torch's names")
    return found


def _term(name: str, dtype: str) -> Term:
    size = ITEM_BYTES[dtype] if dtype else 0
    return Term(name=name, dtype=dtype, bytes_per_parameter=float(size), compressed=COMPRESSED.get(dtype, 1.0))
