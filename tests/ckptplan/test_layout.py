"""Who writes and reads what: closed forms, and the same total under every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptplan.layout import Layout, Sharding, bytes_read, num_files, rank_bytes, writers
from ckptplan.model import Model, Optimizer, per_parameter, state_terms
from ckptstore.errors import InvalidRequest

TERMS = state_terms(Optimizer.ADAMW, "bf16", None, "fp32", "bf16")
DENSE = Model(parameters=960_000)


def test_replicas_write_one_copy() -> None:
    found = writers(DENSE, TERMS, Layout(dp=8))
    assert (num_files(found), rank_bytes(found)) == (1, 16 * 960_000)
    assert bytes_read(DENSE, TERMS, Layout(dp=8)) == 8 * 16 * 960_000


def test_all_replicas_may_share_the_writing() -> None:
    found = writers(DENSE, TERMS, Layout(dp=8, split_replicas=True))
    assert (num_files(found), rank_bytes(found)) == (8, 2 * 960_000)


def test_full_sharding_writes_and_reads_each_byte_once() -> None:
    layout = Layout(dp=8, tp=2, pp=3, sharding=Sharding.FSDP)
    found = writers(DENSE, TERMS, layout)
    assert num_files(found) == layout.world_size == 48
    assert (rank_bytes(found), bytes_read(DENSE, TERMS, layout)) == (16 * 960_000 / 48, 16 * 960_000)


def test_hybrid_sharding_writes_the_first_of_equal_copies() -> None:
    layout = Layout(dp=8, replicas=4, sharding=Sharding.FSDP)
    found = writers(DENSE, TERMS, layout)
    assert (num_files(found), rank_bytes(found)) == (2, 8 * 960_000)
    assert bytes_read(DENSE, TERMS, layout) == 4 * 16 * 960_000


@pytest.mark.parametrize(("sharding", "whole"), [(Sharding.ZERO1, 4), (Sharding.ZERO2, 2)])
def test_zero_distributes_optimizer_state_and_then_gradients(sharding: Sharding, whole: int) -> None:
    layout = Layout(dp=8, sharding=sharding)
    found = writers(DENSE, TERMS, layout)
    assert (num_files(found), rank_bytes(found)) == (8, whole * 960_000 + (16 - whole) * 960_000 / 8)
    assert bytes_read(DENSE, TERMS, layout) == 8 * whole * 960_000 + (16 - whole) * 960_000


def test_experts_are_written_by_the_ranks_that_have_them() -> None:
    model, layout = Model(parameters=960_000, expert_parameters=800_000), Layout(dp=8, ep=4)
    found = writers(model, TERMS, layout)
    assert (num_files(found), rank_bytes(found)) == (4, 16 * (160_000 + 800_000 / 4))
    assert bytes_read(model, TERMS, layout) == 16 * (8 * 160_000 + 2 * 800_000)


@given(
    sharding=st.sampled_from(Sharding), shards=st.sampled_from([1, 2, 4]), replicas=st.sampled_from([1, 2, 3]),
    tp=st.integers(1, 4), pp=st.integers(1, 4), split=st.booleans(), experts=st.integers(0, 900),
)  # fmt: skip
def test_everything_is_written_once_under_every_layout(
    sharding: Sharding, shards: int, replicas: int, tp: int, pp: int, split: bool, experts: int
) -> None:
    model = Model(parameters=1000, expert_parameters=experts)
    layout = Layout(
        dp=shards * replicas, ep=shards, replicas=replicas, tp=tp, pp=pp, sharding=sharding, split_replicas=split
    )
    found, total = writers(model, TERMS, layout), 1000 * per_parameter(TERMS)
    assert sum(group.ranks * group.bytes_per_rank for group in found) == pytest.approx(total)
    assert num_files(found) <= layout.world_size
    assert total / num_files(found) <= rank_bytes(found) * (1 + 1e-9)
    assert total * (1 - 1e-9) <= bytes_read(model, TERMS, layout) <= total * layout.dp * (1 + 1e-9)


def test_125_replicas_read_125_times_as_much() -> None:
    """AWS: 1 TB is written, 125 TB are read, if each of 125 replicas restores for itself."""
    assert bytes_read(Model(parameters=10**12 // 16), TERMS, Layout(dp=125)) == pytest.approx(125e12)


@pytest.mark.parametrize("wrong", [{"dp": 0}, {"tp": -1}, {"dp": 6, "ep": 4}, {"dp": 6, "replicas": 4}])
def test_degrees_that_do_not_match_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        Layout(**wrong)  # type: ignore[arg-type]
