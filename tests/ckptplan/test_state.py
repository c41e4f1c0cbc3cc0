"""Bytes per parameter, against the published figures (MLPerf, ml-engineering, nvCOMP)."""

from __future__ import annotations

import pytest

from ckptplan.model import named_model
from ckptplan.state import Optimizer, derivable, measured_terms, per_parameter, state_terms
from ckptstore.errors import InvalidRequest

ADAMW = Optimizer.ADAMW


@pytest.mark.parametrize(
    ("name", "gib"), [("mlperf-8b", 104.70), ("mlperf-70b", 911.15), ("mlperf-405b", 5291.67), ("mlperf-1t", 15427.01)]
)
def test_the_checkpoints_of_mlperf(name: str, gib: float) -> None:
    terms = state_terms(ADAMW, "bf16", None, "fp32", None)
    assert round(named_model(name).parameters * per_parameter(terms) / 2**30, 2) == gib


@pytest.mark.parametrize(
    ("optimizer", "weights", "master", "moments", "grads", "expected"),
    [
        (ADAMW, "bf16", None, "fp32", None, [2, 4, 4, 4, 0]),
        (ADAMW, "fp32", None, "fp32", None, [4, 0, 4, 4, 0]),
        (ADAMW, "bf16", "none", "fp32", None, [2, 0, 4, 4, 0]),
        (ADAMW, "bf16", "none", "bf16", None, [2, 0, 2, 2, 0]),
        (ADAMW, "bf16", None, "fp32", "bf16", [2, 4, 4, 4, 2]),
        (ADAMW, "fp8", None, "float32", None, [1, 4, 4, 4, 0]),
        (Optimizer.LION, "fp16", "fp32", "fp32", None, [2, 4, 4, 0, 0]),
        (Optimizer.SGD, "fp32", None, "fp32", None, [4, 0, 0, 0, 0]),
        (Optimizer.NONE, "bf16", None, "fp32", None, [2, 0, 0, 0, 0]),
    ],
)
def test_each_term_is_counted(
    optimizer: Optimizer, weights: str, master: str | None, moments: str, grads: str | None, expected: list[float]
) -> None:
    terms = state_terms(optimizer, weights, master, moments, grads)
    assert [term.name for term in terms] == ["weights", "master", "momentum", "variance", "grads"]
    assert [term.bytes_per_parameter for term in terms] == expected


def test_casts_of_masters_need_not_be_stored() -> None:
    assert derivable(state_terms(ADAMW, "bf16", None, "fp32", None)) == {"weights"}
    assert derivable(state_terms(ADAMW, "bf16", "none", "fp32", None)) == set()
    assert derivable(state_terms(ADAMW, "fp32", None, "fp32", None)) == set()


def test_compression_is_near_its_entropy() -> None:
    terms = state_terms(ADAMW, "bf16", None, "fp32", None)
    assert sum(term.bytes_per_parameter * term.compressed for term in terms) == pytest.approx(11.30, rel=0.01)


def test_measured_bytes_are_divided_by_the_parameters() -> None:
    terms = measured_terms({("weights", "float32"): 400, ("other", ""): 8}, 100, 0.8)
    assert [(term.name, term.bytes_per_parameter, term.compressed) for term in terms] == [
        ("weights", 4.0, 0.8),
        ("other", 0.08, 0.8),
    ]


def test_unknown_types_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="bf16"):
        state_terms(ADAMW, "bf17", None, "fp32", None)
