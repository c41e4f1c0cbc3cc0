"""Prefetch: a restore that begins before there is a model, and before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash
from torch import nn

from ckpt import Checkpointer
from ckpt.restoring.prefetching import likely_place
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.leases import active_leases
from ckptstore.errors import InvalidRequest
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.counting import CountingStore
from tests.support.parallel.runner import Scenario, run_scenarios
from tests.support.training import same_state


def network(seed: int) -> nn.Module:
    """Two megabytes."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(360, 360) for _ in range(4)))


def save(folder: Path, step: int) -> Checkpoint:
    with Checkpointer(str(folder), run="r", writer="thread", compress="off") as checkpointer:
        return checkpointer.save(network(step), None, step)


def counted(checkpointer: Checkpointer) -> CountingStore:
    source = checkpointer._source
    assert isinstance(source, StoreSource)
    source.store = counting = CountingStore(source.store)
    return counting


def test_a_restore_after_a_prefetch_reads_no_shard_and_keeps_its_lease(tmp_path: Path) -> None:
    checkpoint, model = save(tmp_path, 7), network(0)
    run = Run(open_store(str(tmp_path)), "r")
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        store = counted(checkpointer)
        prefetch = checkpointer.prefetch()
        assert prefetch.wait() == checkpoint.stored_bytes == store.read_bytes
        (holders,) = active_leases(run).values()
        restored = checkpointer.restore(model)
        assert restored is not None
        assert (restored.id, restored.skipped) == (checkpoint.id, [])
        assert store.read_bytes == checkpoint.stored_bytes
        assert [key for key, _ in store.documents if "manifest" in key] == [
            f"r/attempts/{checkpoint.attempt}/manifest.json.zst"
        ]
        assert same_state(dict(model.state_dict()), dict(network(7).state_dict()))
        assert list(active_leases(run).values()) == [holders]
        assert prefetch.wait() == 0
    assert not active_leases(run)


def test_a_prefetch_of_another_checkpoint_is_dropped(tmp_path: Path) -> None:
    save(tmp_path, 1)
    model, run = network(0), Run(open_store(str(tmp_path)), "r")
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        prefetch = checkpointer.prefetch()
        prefetch.wait()
        with Checkpointer(str(tmp_path), run="r", writer="thread", compress="off") as other:
            other.restore(network(0))
            other.save(network(2), None, 2)
        restored = checkpointer.restore(model)
        assert restored is not None
        assert restored.step == 2
        assert same_state(dict(model.state_dict()), dict(network(2).state_dict()))
        assert prefetch.wait() == 0
        (leased,) = active_leases(run)
        assert leased == restored.checkpoint.attempt


def test_a_restore_by_name_and_stages_take_what_was_prefetched(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    with Checkpointer(str(tmp_path), run="r", writer="thread", compress="off") as other:
        other.restore(network(0))
        other.save(network(2), None, 2)
    model = network(0)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        store = counted(checkpointer)
        checkpointer.prefetch(checkpoint=1).wait()
        with checkpointer.restoring(checkpoint=1) as stages:
            stages.model(model)
        assert store.read_bytes == first.stored_bytes
    assert same_state(dict(model.state_dict()), dict(network(1).state_dict()))


def test_damage_and_an_empty_run_are_left_to_the_restore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        assert checkpointer.prefetch().wait() == 0
        assert checkpointer.restore(network(0)) is None
    save(tmp_path, 1)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        checkpointer.restore(network(0))
        damaged = checkpointer.save(network(2), None, 2)
    (shard,) = (tmp_path / "r" / "attempts" / str(damaged.attempt)).glob("*.ckpt")
    shard.write_bytes(bytes(shard.stat().st_size))
    model = network(0)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        assert checkpointer.prefetch().wait() == 0
        restored = checkpointer.restore(model)
    assert restored is not None
    assert [skipped for skipped, _ in restored.skipped] == [damaged.id]
    assert same_state(dict(model.state_dict()), dict(network(1).state_dict()))


def test_a_prefetch_that_is_not_used_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Checkpointer(str(tmp_path), run="r", writer="thread") as checkpointer:
        prefetch = checkpointer.prefetch(max_bytes=0)
        assert prefetch.wait() == 0
        with pytest.raises(InvalidRequest, match="max_bytes -1 is negative"):
            checkpointer.prefetch(max_bytes=-1)
        checkpointer.prefetch().wait()
    assert not active_leases(Run(open_store(str(tmp_path)), "r"))


BEFORE_TORCH = """
import sys
import ckpt

ckpt.init(sys.argv[1], run="r", writer="thread")
prefetch = ckpt.prefetch()
assert prefetch.wait() == int(sys.argv[2])
assert "torch" not in sys.modules
import xxhash
from torch import nn

model = nn.Sequential(*(nn.Linear(360, 360) for _ in range(4)))
print(ckpt.restore(model).step, xxhash.xxh3_128_hexdigest(model[3].weight.detach().numpy().tobytes()))
"""


def test_it_begins_before_torch_is_imported(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 3)
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_TORCH, str(tmp_path), str(checkpoint.stored_bytes)],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "3",
        xxhash.xxh3_128_hexdigest(network(3).state_dict()["3.weight"].numpy().tobytes()),
    ]


def test_replicas_prefetch_each_byte_once(tmp_path: Path) -> None:
    (tmp_path / "save").mkdir()
    (tmp_path / "restore").mkdir()
    store = str(tmp_path / "store")
    saving = Scenario("tests.ckpt.restoring.replicas:save", 3, {"store": store, "steps": [1]})
    digest = run_scenarios([saving], tmp_path / "save")[0].result()[0]
    restoring = Scenario(
        "tests.ckpt.restoring.replicas:restore", 3,
        {"store": store, "daemon": None, "replica_reads": "broadcast", "prefetch": True},
    )  # fmt: skip
    results = run_scenarios([restoring], tmp_path / "restore")[0].result()
    assert [result["digest"] for result in results] == [digest] * 3
    stored = sum(info.bytes for info in open_store(store).list(""))
    assert sum(result["read"] for result in results) <= 1.05 * stored
    assert all(result["prefetched"] > 0.9 * stored / 3 for result in results)


@pytest.mark.parametrize(
    ("world", "solo", "environ", "expected"),
    [
        ((0, 1), False, {}, (0, 1)),
        ((0, 1), False, {"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
        ((0, 1), True, {"RANK": "3", "WORLD_SIZE": "8"}, (0, 1)),
        ((1, 2), False, {"RANK": "3", "WORLD_SIZE": "8"}, (1, 2)),
        ((0, 1), False, {"RANK": "8", "WORLD_SIZE": "8"}, (0, 1)),
        ((0, 1), False, {"RANK": "", "WORLD_SIZE": "8"}, (0, 1)),
    ],
)
def test_the_rank_before_there_is_a_process_group(
    world: tuple[int, int], solo: bool, environ: dict[str, str], expected: tuple[int, int]
) -> None:
    assert likely_place(world, solo, environ) == expected
