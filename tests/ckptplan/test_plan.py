from __future__ import annotations

import inspect
from typing import Any

import msgspec
import pytest

import ckpt
from ckptplan.inputs import PlanInputs
from ckptplan.plan import Plan, make_plan, plan, retained
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy

GIB = 2**30


def test_the_floor_of_the_interval_is_size_by_bandwidth() -> None:
    """MLPerf Storage v3.0: 15,427 GiB at 888 GiB/s; 17.6 s were measured."""
    found = plan(model="mlperf-1t", dp=8, tp=2, pp=64, bandwidth=888 * GIB, compress=False, mtbf_s=3600, stall_s=1e-6)
    assert found.interval.durable_s == pytest.approx(17.37, abs=0.01)
    assert found.interval.ettr_s == found.interval.durable_s


def test_a_whole_plan() -> None:
    found = plan(
        model="mlperf-70b", dp=8, tp=8, sharding="fsdp", bandwidth=60e9, window_s=60, failures="llama3",
        restart_s=300, stall_s=0.2, slowdown_s=0.3, steps=100_000, step_s=4, micro_batch=2, accumulation=4,
        keep=Policy(keep_last=5), price=0.02,
    )  # fmt: skip
    assert found.size.raw_bytes / GIB == pytest.approx(911.15, abs=0.005)
    assert found.size.stored_bytes == found.size.compressed_bytes < found.size.raw_bytes
    assert found.ranks.files == found.ranks.world_size == 64
    assert found.ranks.host_bytes_per_node == 8 * found.ranks.host_bytes_per_rank
    assert found.sync is not None
    assert found.sync.aggregate * 60 == pytest.approx(found.size.stored_bytes)
    assert found.sync.per_writer * 64 == pytest.approx(found.sync.aggregate)
    assert found.interval.cost_s == 0.5
    assert found.interval.chosen_s == found.interval.ettr_s
    assert found.interval.ettr is not None
    assert found.training is not None
    assert found.training.with_failures_s == pytest.approx(400_000 / found.interval.ettr)
    assert found.retained is not None
    assert (found.retained.stored_bytes, found.global_batch) == (5 * found.size.stored_bytes, 4 * 8 * 2)
    assert found.termination_grace_period_s == 4 + 14 + 5  # a step, 0.2 + 13.2 s, and spare seconds


def test_only_what_is_known_is_planned() -> None:
    found = plan(parameters=7e9)
    assert (found.sync, found.background, found.training, found.retained) == (None, None, None, None)
    assert (found.interval.durable_s, found.interval.ettr, found.termination_grace_period_s) == (None, None, None)
    assert found.restore.seconds_shared is None
    assert found.interval.stall_source.startswith("assumed")
    with pytest.raises(TypeError, match="params"):
        plan(params=7e9)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest):
        plan()


def test_only_ranks_that_write_need_memory_for_slots() -> None:
    one_writer = plan(parameters=1e9, dp=8, slots=3).ranks
    assert one_writer.host_bytes_per_node == one_writer.host_bytes_per_rank == 3 * 14_000_000_000
    all_write = plan(parameters=1e9, dp=16, sharding="fsdp").ranks
    assert all_write.host_bytes_per_node == 8 * all_write.host_bytes_per_rank == 14_000_000_000


def test_the_slowest_of_store_and_rank_decides() -> None:
    fast, slow = 1e12, 1e9
    for bandwidth, sharding in ((slow, "fsdp"), (fast, "ddp")):
        one = plan(parameters=1e9, dp=8, sharding=sharding, bandwidth=bandwidth, rank_bandwidth=slow, compress=False)
        assert one.interval.durable_s == pytest.approx(14)


def test_derived_casts_are_not_stored_and_saves_that_pile_up_are_visible() -> None:
    found = plan(parameters=1e9, dedup_casts=True, compress=False, interval_s=10, durable_s=20, mtbf_s=3600)
    assert (found.size.raw_bytes, found.size.stored_bytes) == (14_000_000_000, 12_000_000_000)
    assert found.interval.write_share == 2.0


def test_replicas_that_share_reads() -> None:
    found = plan(parameters=1e9, dp=125, bandwidth=10e9, compress=False).restore
    assert found.bytes_each_for_itself == 125 * found.bytes_shared
    assert found.seconds_shared == pytest.approx(1.4)
    assert found.seconds_each_for_itself == pytest.approx(125 * 1.4)


def test_no_interval_gives_progress() -> None:
    found = plan(parameters=1e9, durable_s=100, restart_s=600, mtbf_s=500, steps=10, step_s=1)
    assert found.interval.ettr_s is None
    assert found.training is not None
    assert found.training.with_failures_s is None


def test_requests_of_multipart_uploads() -> None:
    found = plan(parameters=1e9, dp=4, sharding="fsdp", compress=False, window_s=10).requests
    # Each file of 3.5 GB: 418 parts, begin and end. Then four receipts, manifest and outcome.
    assert found.puts_per_save == 4 * (418 + 2) + 4 + 2
    assert found.puts_per_s == pytest.approx(found.puts_per_save / 10)
    assert plan(parameters=1000).requests.puts_per_save == 1 + 1 + 2


def test_the_plan_is_the_same_by_keywords_and_as_json() -> None:
    found = plan(parameters=7e9, mtbf_s=3600)
    assert found == make_plan(PlanInputs(parameters=7e9, mtbf_s=3600))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found
    assert ckpt.plan is plan
    assert list(inspect.signature(ckpt.plan).parameters) == list(PlanInputs.__struct_fields__)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (None, 1000), (Policy(keep_last=5), 5), (Policy(keep_every=1000), 10),
        (Policy(keep_last=5, keep_every=1000), 14), (Policy(keep_hourly=24), 17), (Policy(keep_within_s=600), 11),
        (Policy(keep_last=2, keep_best=("loss:min:3",)), 5), (Policy(keep_last=2, keep_best=("accuracy:max:3",)), 5),
    ],
)  # fmt: skip
def test_rules_are_those_that_prune(policy: Policy | None, kept: int) -> None:
    """1000 saves, one every ten steps of six seconds: 16.7 hours."""
    found = retained(policy, num_saves=1000, interval_s=60, step_s=6, stored_bytes=7, price=None)
    assert (found.num_kept, found.stored_bytes, found.price_per_month) == (kept, 7 * kept, None)


def test_the_price_is_per_gigabyte_and_month() -> None:
    found = retained(Policy(keep_last=5), 100, 60, 6, stored_bytes=1000 * 10**9, price=0.02)
    assert found.price_per_month == pytest.approx(5 * 1000 * 0.02)
    assert retained(Policy(keep_last=5), 0, 60, 6, 7, 1.0).stored_bytes == 0, "no saves cost nothing"
    with pytest.raises(InvalidRequest, match="--interval"):
        retained(Policy(keep_last=5), 1_000_000, 0.1, 6, 7, None)


def test_a_local_tier_of_each_node_is_as_fast_as_its_disk_and_network() -> None:
    asked: dict[str, Any] = {
        "parameters": 1024e9,
        "dp": 8192,
        "sharding": "fsdp",
        "compress": False,
    }
    made = {
        copies: plan(**asked, failure_rate=1.0, local_replicas=copies, disk_bandwidth=2e9, network_bandwidth=12.5e9,
                     restart_s=300)
        for copies in (0, 1, 2)
    }  # fmt: skip
    each = 14e9  # 14 bytes for each parameter, on 1,024 nodes
    for copies, found in made.items():
        local = found.local
        assert local is not None
        assert (local.stored_bytes_per_node, local.wire_bytes_per_node) == ((copies + 1) * each, copies * each)
        assert local.durable_s == pytest.approx((copies + 1) * 7)
        assert (local.restore_own_s, local.restore_peer_s) == pytest.approx((7, 7))
    gone = 307 / (1000 * 86_400)  # that another node is gone while one is replaced
    assert [found.local and found.local.absorbed for found in made.values()] == pytest.approx(
        [0, 1 - 2 * gone, 1 - 3 * gone**2]
    )
    assert plan(parameters=1e9, dp=8, local_replicas=1).local.absorbed is None  # type: ignore[union-attr]
