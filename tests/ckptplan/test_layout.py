"""Who writes and reads what: closed forms, and the same total under every layout."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptplan.layout import Layout, Sharding, bytes_read, num_files, rank_bytes, writers
from ckptplan.model import Model, per_parameter, state_terms
from ckptstore.errors import InvalidRequest

TERMS = state_terms("adamw", "bf16", None, "fp32", "bf16")
P = 960_000
DENSE = Model(parameters=P)
EXPERTS = Model(parameters=P, expert_parameters=800_000)
TERABYTE = Model(parameters=10**12 // 16)


@pytest.mark.parametrize(
    ("model", "layout", "files", "rank", "read"),
    [
        # Replicas write one copy; or all of them share the writing.
        (DENSE, Layout(dp=8), 1, 16 * P, 8 * 16 * P),
        (DENSE, Layout(dp=8, split_replicas=True), 8, 2 * P, 8 * 16 * P),
        # Full sharding writes and reads each byte once; hybrid sharding writes the first of equal copies.
        (DENSE, Layout(dp=8, tp=2, pp=3, sharding=Sharding.FSDP), 48, 16 * P / 48, 16 * P),
        (DENSE, Layout(dp=8, replicas=4, sharding=Sharding.FSDP), 2, 8 * P, 4 * 16 * P),
        # ZeRO distributes optimizer state, and then gradients.
        (DENSE, Layout(dp=8, sharding=Sharding.ZERO1), 8, 4 * P + 12 * P / 8, 8 * 4 * P + 12 * P),
        (DENSE, Layout(dp=8, sharding=Sharding.ZERO2), 8, 2 * P + 14 * P / 8, 8 * 2 * P + 14 * P),
        # Experts are written by the ranks that have them.
        (EXPERTS, Layout(dp=8, ep=4), 4, 16 * (160_000 + 800_000 / 4), 16 * (8 * 160_000 + 2 * 800_000)),
        # AWS: 1 TB is written, 125 TB are read, if each of 125 replicas restores for itself.
        (TERABYTE, Layout(dp=125), 1, 1e12, 125e12),
    ],
)
def test_who_writes_and_reads_how_much(model: Model, layout: Layout, files: int, rank: float, read: float) -> None:
    found = writers(model, TERMS, layout)
    assert (num_files(found), rank_bytes(found), bytes_read(model, TERMS, layout)) == (files, rank, read)


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


@pytest.mark.parametrize("wrong", [{"dp": 0}, {"tp": -1}, {"dp": 6, "ep": 4}, {"dp": 6, "replicas": 4}])
def test_degrees_that_do_not_match_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest):
        Layout(**wrong)  # type: ignore[arg-type]
