"""Checkpointers of process groups: each saves and restores on its ranks, and the others take no part."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from ckpt.ranks import world as ranks_world
from ckpt.restoring import sharing
from ckptstore.errors import CkptError, InvalidRequest, UnsupportedObject
from ckptstore.reading.fetch import fetch_stored
from tests.support.command_line import invoke
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios

_RANKS = f"{__name__}:"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups") / "store"


@pytest.fixture(scope="module")
def outcomes(store: Path) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    at = {"store": str(store)}
    scenarios: dict[object, Scenario] = {"at once": Scenario(f"{_RANKS}at_once", 4, at)}
    for split in (False, True):
        arguments = {"store": f"{store}-{split}", "split_replicas": split}
        scenarios["replica", split] = Scenario(f"{_RANKS}one_replica", 4, arguments)
    scenarios["refused"] = Scenario(f"{_RANKS}refused", 2, at)
    scenarios["wait"] = Scenario(f"{_RANKS}wait_in_a_restore", 2, at | {"notice_s": 0.3})
    ranks = store.parent / "ranks"
    ranks.mkdir()
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), ranks, together=True), strict=True))


def test_two_groups_save_and_restore_a_run_each_at_once(outcomes: dict[object, Outcome], store: Path) -> None:
    found = outcomes["at once"].result()
    assert [result["step"] for result in found] == [3, 5, 3, 5]
    assert all(result["equal"] and result["world_size"] == 2 for result in found)
    assert [result["position"] for result in found] == [0, 1, 2, 3]
    assert [result["asks"] for result in found] == [True, True, False, False], "rank 0 of the job is in one group"
    for rank, result in enumerate(found):
        assert f"ranks {rank % 2} and {rank % 2 + 2} hold different tensors" in result["problems"][0]
    assert [result["problems"][1].partition(":")[0] for result in found[:2]] == ["rank 2", "rank 3"]
    for run in ("run-0@3", "run-1@5"):
        assert invoke("--store", store, "verify", run).code == 0


@pytest.mark.parametrize("split_replicas", [False, True])
def test_a_checkpoint_of_one_replica_group_is_whole(outcomes: dict[object, Outcome], split_replicas: bool) -> None:
    """Its copies are not copy 0 of the mesh; all ranks restore it."""
    for result in outcomes["replica", split_replicas].result():
        assert result["restored"] == result["values"]


def test_a_rank_outside_the_group_and_a_group_with_a_part_are_refused(outcomes: dict[object, Outcome]) -> None:
    inside, outside = outcomes["refused"].result()
    assert "'model/0.weight' is sharded over ranks" in inside[0]
    assert "what rank 1 does" in inside[0]
    assert "is none that this process is in" in outside[0]
    assert "make the Checkpointer only on the ranks of that group" in outside[0]
    for result in (inside, outside):
        assert "the process group of this Checkpointer does not exist" in result[1]


def test_a_rank_that_waits_long_in_a_restore_logs_for_which(outcomes: dict[object, Outcome]) -> None:
    waiting, awaited = outcomes["wait"].result()
    assert waiting == ["rank 0 has waited 0 s for rank 1 of 2; all ranks must make the same calls of ckpt"]
    assert awaited == []


def _trained(seed: int, mesh: Any, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        optim.step()
        optim.zero_grad()
    return model, optim


def _values(model: nn.Module) -> dict[str, Any]:
    # A collective of the mesh.
    return {name: value.full_tensor().tolist() for name, value in model.state_dict().items()}


def _problem(checkpointer: Checkpointer, model: nn.Module, position: object = 0) -> str:
    with pytest.raises(UnsupportedObject) as caught:
        checkpointer.prepare(model, None, position=position)
    return caught.value.message


def at_once(store: str) -> dict[str, Any]:
    """Ranks 0 and 2, and ranks 3 and 1, train, save and restore a run each; neither group waits for the other."""
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    number = dist.get_rank() % 2
    own = DeviceMesh.from_group(groups[number], "cpu")
    model, optim = _trained(number, own)
    with Checkpointer(store, run=f"run-{number}", group=groups[number], writer="thread") as checkpointer:
        schedule = checkpointer.every(seconds=1000)
        for step in range(1, 4 + 2 * number):  # the groups make different calls
            schedule.due(step)
            checkpointer.save(model, optim, step, position=dist.get_rank())
        other, other_optim = _trained(7, own, steps=2)
        restored = checkpointer.restore(other, other_optim, position=None)
        assert restored is not None
        problems = [_problem(checkpointer, nn.Linear(2 + dist.get_rank(), 2))]
        problems.append(_problem(checkpointer, model, object() if dist.get_rank() >= 2 else 0))
    dist.barrier()
    return {
        "problems": problems,
        "asks": checkpointer._is_first(),
        "step": restored.step,
        "equal": _values(model) == _values(other),
        "position": restored.values["position"],
        "world_size": restored.checkpoint.world_size,
    }


def one_replica(store: str, split_replicas: bool) -> dict[str, Any]:
    """Hybrid sharding; the second replica group saves, the first one does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, optim = _trained(3, mesh)
    group = mesh["shard"].get_group()
    options: dict[str, Any] = {"writer": "thread", "split_replicas": split_replicas}
    if dist.get_rank() >= 2:
        with Checkpointer(store, run="replica", group=group, **options) as checkpointer:
            checkpointer.save(model, optim, 1)
    values = _values(model)
    dist.barrier()
    with Checkpointer(store, run="replica", **options) as checkpointer:  # all four restore what the two have saved
        other, other_optim = _trained(9, mesh)
        assert checkpointer.restore(other, other_optim) is not None
    return {"values": values, "restored": _values(other)}


def refused(store: str) -> list[str]:
    """A rank outside of the group, a group that is gone, a group that holds half of the state."""
    found: list[str] = []

    def refuse(error: type[CkptError], group: Any, save: Any = None) -> None:
        try:
            with Checkpointer(store, run="refused", group=group, writer="thread") as checkpointer:
                checkpointer.save(save, None, 1) if save is not None else checkpointer.restore()
        except error as caught:
            found.append(str(caught))

    model, _ = _trained(0, init_device_mesh("cpu", (2,)))
    first = dist.new_group([0])
    if dist.get_rank() == 1:
        refuse(InvalidRequest, first)
    else:
        refuse(UnsupportedObject, first, model)
    both = dist.new_group([0, 1])
    dist.destroy_process_group(both)
    refuse(InvalidRequest, both)
    dist.barrier()
    return found


def wait_in_a_restore(store: str, notice_s: float) -> list[str]:
    """Rank 1 is slow to read its part of a checkpoint; what rank 0 logs while it waits in an exchange of bytes."""
    logged: list[str] = []
    store_of_ranks = dist.distributed_c10d._get_default_store()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())
            ranks_world.NOTICE_S, ranks_world._HERE_S = usual
            store_of_ranks.set("logged", "")

    def fetch(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            store_of_ranks.wait(["logged"])
        elif not logged:  # on a busy machine ranks may wait for one another in other meetings too
            ranks_world.NOTICE_S, ranks_world._HERE_S = notice_s, notice_s / 2
        return fetch_stored(*arguments)

    logging.getLogger("ckpt.ranks.world").addHandler(Handler())
    usual = ranks_world.NOTICE_S, ranks_world._HERE_S
    setattr(sharing, "fetch_stored", fetch)  # noqa: B010 - the name is the other module's
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    with Checkpointer(store, run="slow", writer="thread", replica_reads="broadcast") as checkpointer:
        checkpointer.save(model, None, 1)
        checkpointer.restore(model)
    dist.barrier()
    return logged
