"""Intervals, ETTR and failure rates, against the figures that their sources print."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptplan.failures import PRESETS, best_interval, daly, ettr, mtbf, nvidia, young
from ckptstore.errors import InvalidRequest

LLAMA3_S = 11_135.0
"""Mean time between the failures of Llama 3."""


@pytest.mark.parametrize(
    ("mtbf_s", "minutes", "published"), [(86_400, 116.69, 117), (21_600, 56.71, 57), (900, 9.14, 9.1)]
)
def test_daly_gives_the_intervals_in_his_figures(mtbf_s: float, minutes: float, published: float) -> None:
    """FGCS 2006, captions of figures 3 to 5: δ = 5 min."""
    found = daly(300, mtbf_s) / 60
    assert found == pytest.approx(minutes, abs=0.005)
    assert float(f"{found:.1f}" if published < 10 else f"{found:.0f}") == published


def test_daly_is_the_time_between_failures_for_very_expensive_saves() -> None:
    assert daly(1800, 900) == daly(5000, 900) == 900


def test_young() -> None:
    assert young(60, LLAMA3_S) == pytest.approx(1155.9, abs=0.05)
    assert daly(60, LLAMA3_S) == pytest.approx(1116.3, abs=0.05)


def test_nvidia_and_its_limit() -> None:
    assert nvidia(60, LLAMA3_S, 300) == pytest.approx(1232.9, abs=0.1)
    assert nvidia(0.001, LLAMA3_S, 0) == pytest.approx(young(0.001, LLAMA3_S), rel=1e-3)


@pytest.mark.parametrize(
    ("restart_s", "ratios"),
    [(300, [0.876, 0.916, 0.944, 0.961, 0.967, 0.970]), (30, [0.899, 0.939, 0.968, 0.985, 0.991, 0.994])],
)
def test_the_table_of_training_time_ratios(restart_s: float, ratios: list[float]) -> None:
    """Meta's formula (arXiv 2410.21680) with the failures of Llama 3, at the best interval for each stall."""
    for cost_s, ratio in zip((60, 20, 5, 0.8, 0.2, 0.05), ratios, strict=True):
        interval_s = best_interval(cost_s, LLAMA3_S, restart_s)
        assert round(ettr(interval_s, cost_s, LLAMA3_S, restart_s), 3) == ratio


def test_the_best_intervals_of_that_table() -> None:
    found = [best_interval(cost_s, LLAMA3_S, 300) for cost_s in (60, 20, 5, 0.8, 0.2, 0.05)]
    assert found == pytest.approx([1082, 638, 324, 131, 66, 33], abs=0.7)


def test_a_blocking_save_of_two_minutes() -> None:
    assert ettr(5400, 120, LLAMA3_S, 600) == pytest.approx(0.688, abs=0.001)


@pytest.mark.parametrize(("nodes", "hours"), [(16_384 // 8, 1.80), (131_072 // 8, 0.225), (1_024 // 8, 28.8)])
def test_the_projections_of_meta(nodes: int, hours: float) -> None:
    """Published 1.8 and 0.23 hours. For 1,024 GPUs 7.9 hours were measured: the formula is a projection."""
    assert mtbf(nodes, PRESETS["rsc-1"].per_1000_node_days) / 3600 == pytest.approx(hours, rel=0.005)


def test_the_failures_of_llama_3_and_of_mlcommons() -> None:
    assert PRESETS["llama3"].per_1000_node_days == pytest.approx(3.79, abs=0.005)
    assert mtbf(2048, PRESETS["llama3"].per_1000_node_days) == pytest.approx(LLAMA3_S, abs=0.5)
    assert mtbf(100_000 // 8, PRESETS["mlcommons"].per_1000_node_days) / 3600 == pytest.approx(0.5)


@given(
    cost_s=st.floats(0.01, 600),
    mtbf_s=st.floats(600, 1e7),
    restart_s=st.floats(0, 500),
    durable_s=st.floats(0, 90),
    factor=st.floats(0.3, 3.0),
)
def test_no_other_interval_is_better(
    cost_s: float, mtbf_s: float, restart_s: float, durable_s: float, factor: float
) -> None:
    best = best_interval(cost_s, mtbf_s, restart_s, durable_s)
    other = max(durable_s, best * factor)
    ratio = ettr(best, cost_s, mtbf_s, restart_s, durable_s)
    assert ratio >= ettr(other, cost_s, mtbf_s, restart_s, durable_s) * (1 - 1e-12)


def test_time_until_durable_is_lost_work() -> None:
    with_exposure = ettr(600, 1, LLAMA3_S, 60, durable_s=120)
    assert with_exposure == pytest.approx(ettr(600, 1, LLAMA3_S, 60 + 120))
    assert best_interval(0.001, LLAMA3_S, durable_s=120) == 120, "saves do not overlap"
    assert best_interval(1, 100, restart_s=90, durable_s=20) == inf
    assert ettr(600, 1, 100, 90) == 0


def test_a_rate_must_be_positive() -> None:
    with pytest.raises(InvalidRequest):
        mtbf(8, 0)
