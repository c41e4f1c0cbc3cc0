from __future__ import annotations

from typing import Any

import pytest

from ckptplan.inputs import PlanInputs
from ckptplan.training import PRESETS
from ckptstore.errors import InvalidRequest

SHAPE: dict[str, Any] = {"layers": 4, "hidden": 192, "ffn": 768, "heads": 6, "vocab": 256}


def test_a_model_is_given_in_one_of_three_ways() -> None:
    assert PlanInputs(parameters=7e9).counted().parameters == 7_000_000_000
    assert PlanInputs(model="mlperf-8b").counted().source == "mlperf-8b"
    assert PlanInputs(**SHAPE).counted().parameters == 4 * (4 * 192**2 + 3 * 192 * 768) + 2 * 256 * 192
    assert PlanInputs(**SHAPE, tied=True).counted().parameters == PlanInputs(**SHAPE).counted().parameters - 256 * 192


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "no model"),
        ({"parameters": 1e9, "model": "mlperf-8b"}, "several models"),
        ({"parameters": 1e9, "layers": 3}, "several models"),
        ({"layers": 3, "hidden": 64}, "ffn, heads, vocab are missing"),
        ({"parameters": 1e9, "expert_parameters": 2e9}, "experts"),
    ],
)
def test_models_that_cannot_be_counted(inputs: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        PlanInputs(**inputs).counted()


@pytest.mark.parametrize(
    "wrong",
    [{"interval_s": 0.0}, {"bandwidth": -1.0}, {"mtbf_s": float("inf")}, {"step_s": float("nan")}, {"processes": 0}],
)
def test_numbers_and_names_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        PlanInputs(parameters=1e9, **wrong)
    with pytest.raises(InvalidRequest, match="zero3"):
        PlanInputs(sharding="zero4").layout()
    with pytest.raises(InvalidRequest, match="sgd-momentum"):
        PlanInputs(optimizer="adamx").state()


def test_the_data_parallel_degree_follows_from_nodes_and_processes() -> None:
    inputs = PlanInputs(nodes=2048, processes=8, tp=8, pp=16)
    assert (inputs.layout().dp, inputs.layout().nodes, PlanInputs().layout().world_size) == (128, 2048, 1)
    with pytest.raises(InvalidRequest, match="multiple"):
        PlanInputs(nodes=3, tp=16).layout()


def test_the_failure_rate_is_given_once() -> None:
    assert (PlanInputs().mtbf(8), PlanInputs(mtbf_s=3600).mtbf(8)) == ((None, ""), (3600, "given"))
    assert PlanInputs(failure_rate=6.5).mtbf(2048)[0] == pytest.approx(6490, abs=1)
    for name, rate in PRESETS.items():
        assert PlanInputs(failures=name).mtbf(8)[1] == rate.source
    with pytest.raises(InvalidRequest, match="llama3"):
        PlanInputs(failures="llama4").mtbf(8)
    with pytest.raises(InvalidRequest, match="twice"):
        PlanInputs(failures="llama3", mtbf_s=3600).mtbf(8)


def test_batch_and_steps_are_given_once() -> None:
    assert PlanInputs(samples=1000, global_batch=10).num_steps(10) == 100
    inputs = PlanInputs(samples=1000, micro_batch=5, accumulation=2)
    assert inputs.num_steps(inputs.batch(1)) == 100
    assert PlanInputs(micro_batch=5, accumulation=2).batch(16) == 160
    for wrong in (PlanInputs(global_batch=1, micro_batch=1), PlanInputs(steps=1, samples=1), PlanInputs(samples=1)):
        with pytest.raises(InvalidRequest):
            wrong.num_steps(wrong.batch(1))
