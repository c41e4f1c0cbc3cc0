"""The same figures from mlsysim, an implementation that shares no code with ours."""

from __future__ import annotations

from typing import Any

import pytest

from ckptplan.model import MODELS, Optimizer, named_model, per_parameter, state_terms
from ckptplan.training import mtbf, young


@pytest.fixture(scope="module")
def theirs() -> Any:
    """The module with the formulas. Its import takes seconds."""
    import mlsysim.physics

    return mlsysim.physics


@pytest.fixture(scope="module")
def quantity(theirs: Any) -> Any:
    """Numbers with units."""
    from mlsysim.core.units import Q_

    return Q_


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_checkpoints(theirs: Any, quantity: Any, name: str) -> None:
    parameters = named_model(name).parameters
    ours = parameters * per_parameter(state_terms(Optimizer.ADAMW, "bf16", None, "fp32", None))
    assert ours == pytest.approx(theirs.calc_checkpoint_size(quantity(parameters, "")).m_as("B"))


@pytest.mark.parametrize("cost_s", [0.2, 60, 600])
@pytest.mark.parametrize("mtbf_s", [3600, 11_135, 1e7])
def test_intervals(theirs: Any, quantity: Any, cost_s: float, mtbf_s: float) -> None:
    found = theirs.calc_young_daly_interval(quantity(cost_s, "s"), quantity(mtbf_s, "s"))
    assert young(cost_s, mtbf_s) == pytest.approx(found.m_as("s"))


@pytest.mark.parametrize("nodes", [1, 2048, 16_384])
@pytest.mark.parametrize("component_h", [3692.3, 50_000 / 8])
def test_times_between_failures(theirs: Any, quantity: Any, nodes: int, component_h: float) -> None:
    found = theirs.calc_mtbf_cluster(quantity(component_h, "hour"), nodes)
    assert mtbf(nodes, 24_000 / component_h) == pytest.approx(found.m_as("s"))
