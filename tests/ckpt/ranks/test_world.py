"""Ranks meet through the store of their process group, in worlds and groups; a rank that does not come is named."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from ckpt.ranks import world as ranks_world
from ckpt.ranks.world import World, absent, call_with_timeout
from ckpt.restoring import sharing
from ckptstore.errors import CkptError, InvalidRequest, RankLost, UnsupportedObject
from ckptstore.reading.fetch import fetch_stored
from tests.support.command_line import invoke
from tests.support.parallel.runner import Outcome, Scenario, logged, run_named
from tests.support.waiting import present, wait_until

_TIMEOUT_S = 3.0
_ROUNDS = 3
_STORES = ("file", "tcp")
_LOST = list(product(_STORES, ("SIGKILL", "SIGSTOP"), (0, 2)))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    scenarios: dict[object, Scenario] = {}
    for store in _STORES:
        tcp = store == "tcp"
        scenarios["meet", store] = Scenario(f"{__name__}:meet", 3, {"rounds": _ROUNDS}, tcp=tcp)
        scenarios["twice", store] = Scenario(f"{__name__}:live_twice", 3, tcp=tcp)
        scenarios["slow", store] = Scenario(f"{__name__}:be_slow", 3, {"timeout_s": _TIMEOUT_S}, tcp=tcp)
    scenarios["late"] = Scenario(f"{__name__}:come_late", 3, {"notice_s": 0.2}, tcp=True)
    for case in _LOST:
        store, how, lost = case
        arguments = {"lost": lost, "how": how, "timeout_s": _TIMEOUT_S}
        scenarios[case] = Scenario(f"{__name__}:lose", 3, arguments, lost=(lost,), tcp=store == "tcp")
    return run_named(scenarios, tmp_path_factory.mktemp("world"), together=True)


@pytest.mark.parametrize("store", _STORES)
def test_every_rank_receives_all_values_in_one_world_after_another(outcomes: dict[object, Outcome], store: str) -> None:
    """Meetings leave nothing but the last answer."""
    expected: list[object] = []
    for number in [*range(_ROUNDS), *range(_ROUNDS)]:
        expected += [[[number, rank, b"\x00\xff", None] for rank in range(3)], {"from": 0, "number": number}]
    for result in outcomes["meet", store].result():
        assert (result["heard"], result["left"]) == (repr(expected), [str(4 * _ROUNDS + 1)])


@pytest.mark.parametrize("store", _STORES)
def test_values_of_an_earlier_life_of_the_job_are_not_read(outcomes: dict[object, Outcome], store: str) -> None:
    lives = [[[name, rank] for rank in range(3)] for name in ("first", "second")]
    assert outcomes["twice", store].result() == [lives] * 3


@pytest.mark.parametrize(("store", "how", "lost"), _LOST)
def test_a_lost_rank_is_named(outcomes: dict[object, Outcome], store: str, how: str, lost: int) -> None:
    results = outcomes[store, how, lost].result()
    for result in (result for rank, result in enumerate(results) if rank != lost):
        # With rank 0 its store is gone as well, and the rank that hosts it is named.
        assert f"rank {lost}" in result["said"]


@pytest.mark.parametrize("store", _STORES)
def test_a_slow_rank_that_gives_signs_of_life_is_waited_for(outcomes: dict[object, Outcome], store: str) -> None:
    assert outcomes["slow", store].result() == [[0, 1, 2]] * 3


def test_a_rank_that_waits_long_logs_once_for_which(outcomes: dict[object, Outcome]) -> None:
    logged = outcomes["late"].result()[0]
    assert logged == ["rank 0 has waited 0 s for ranks 1, 2 of 3; all ranks must make the same calls of ckpt"]


@given(st.sets(st.integers(0, 299), max_size=40))
def test_ranks_that_have_not_come_are_found_in_few_requests(missing: set[int]) -> None:
    requests = []

    def exist(*keys: str) -> bool:
        requests.append(keys)
        return missing.isdisjoint(map(int, keys))

    assert absent(exist, [str(rank) for rank in range(300)]) == sorted(missing)[:8]
    assert len(requests) <= 1 + 2 * 9 * min(8, len(missing))


def test_one_process_is_a_world_of_its_own() -> None:
    world = World(1.0)
    assert (world.rank, world.size, world.gather("a")) == (0, 1, ["a"])
    world.beat()


_LONG_S = 60.0


def test_a_call_is_made_in_a_thread_of_its_own_and_raises_its_error() -> None:
    assert call_with_timeout(_LONG_S, threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError, match="lost"):
        call_with_timeout(_LONG_S, Mock(side_effect=KeyError("lost")))


def test_a_call_that_hangs_delays_no_other_and_its_thread_ends_after_it() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        call_with_timeout(0.01, end.wait)
    assert call_with_timeout(_LONG_S, int, "7") == 7
    end.set()
    wait_until(lambda: "ckpt-meeting" not in {thread.name for thread in threading.enumerate()}, "its end")


def meet(rounds: int) -> dict[str, Any]:
    """Several meetings, in two worlds after one another; what was received, and which keys are left."""
    store = World(30)._store
    heard: list[Any] = []
    for world in (World(30), World(30)):
        for number in range(rounds):
            heard.append(world.gather([number, world.rank, b"\x00\xff", None]))
            heard.append(world.decide({"from": world.rank, "number": number}, lambda found: found[0]))
    World(30).gather("end")
    dist.barrier()  # rank 0 clears up after it has answered
    keys = [f"{number}{of_rank}" for number in range(4 * rounds + 2) for of_rank in ("", "/0", "/1", "/2")]
    left = [key for key in keys if store.check([key])]
    dist.barrier()  # the store may live in rank 0
    return {"heard": repr(heard), "left": left}


def live_twice() -> list[list[Any]]:
    """Two lives of a job on one store, as after a restart by torchrun. In the second, rank 0 is the last to come."""
    store = dist.distributed_c10d._get_default_store()
    first = World(30).gather(["first", dist.get_rank()])
    dist.barrier()
    ranks_world._meetings.clear()  # as in a new process
    if dist.get_rank() == 0:
        store.wait(["second life"])
    else:
        store.set("second life", "")
    return [first, World(30).gather(["second", dist.get_rank()])]


def lose(lost: int, how: str, timeout_s: float) -> dict[str, Any]:
    world = World(timeout_s)
    try:
        world.gather(None)
        if world.rank == lost:
            os.kill(os.getpid(), getattr(signal, how))
        world.gather(None)
    except RankLost as error:
        return {"said": str(error)}
    return {"said": "all are here"}


def come_late(notice_s: float) -> list[str]:
    """Ranks 1 and 2 come after the notice of rank 0 is logged; what rank 0 logged."""
    world, store = World(30), dist.distributed_c10d._get_default_store()
    ranks_world.NOTICE_S = notice_s
    with logged() as lines:
        if world.rank:
            store.wait(["logged"])
        else:
            Thread(target=_set_when, args=(store, lines), daemon=True).start()
        world.gather(None)
    return lines


def _set_when(store: Any, logged: list[str]) -> None:
    wait_until(lambda: logged)
    store.set("logged", "")


def be_slow(timeout_s: float) -> list[Any]:
    """Rank 1 comes late to a meeting, and gives signs of life from another thread meanwhile."""
    world = World(timeout_s)
    world.gather(None)
    if world.rank == 1:
        done = Event()
        beating = Thread(target=_beat, args=(world, done))
        beating.start()
        time.sleep(2 * timeout_s)
        done.set()
        beating.join()
    heard = world.gather(world.rank)
    dist.barrier()  # the store may live in rank 0
    return heard


def _beat(world: World, done: Event) -> None:
    while not done.wait(0.05):
        world.beat()


_RANKS = f"{__name__}:"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("groups") / "store"


@pytest.fixture(scope="module")
def group_outcomes(store: Path) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    at = {"store": str(store)}
    scenarios: dict[object, Scenario] = {"at once": Scenario(f"{_RANKS}at_once", 4, at)}
    for split in (False, True):
        arguments = {"store": f"{store}-{split}", "split_replicas": split}
        scenarios["replica", split] = Scenario(f"{_RANKS}one_replica", 4, arguments)
    scenarios["refused"] = Scenario(f"{_RANKS}refused", 2, at)
    scenarios["wait"] = Scenario(f"{_RANKS}wait_in_a_restore", 2, at | {"notice_s": 0.3})
    ranks = store.parent / "ranks"
    return run_named(scenarios, ranks, together=True)


def test_two_groups_save_and_restore_a_run_each_at_once(group_outcomes: dict[object, Outcome], store: Path) -> None:
    found = group_outcomes["at once"].result()
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
def test_a_checkpoint_of_a_replica_group_is_whole(group_outcomes: dict[object, Outcome], split_replicas: bool) -> None:
    """Its copies are not copy 0 of the mesh; all ranks restore it."""
    for result in group_outcomes["replica", split_replicas].result():
        assert result["restored"] == result["values"]


def test_a_rank_outside_the_group_and_a_group_with_a_part_are_refused(group_outcomes: dict[object, Outcome]) -> None:
    inside, outside = group_outcomes["refused"].result()
    assert "'model/0.weight' is sharded over ranks" in inside[0]
    assert "what rank 1 does" in inside[0]
    assert "is none that this process is in" in outside[0]
    assert "make the Checkpointer only on the ranks of that group" in outside[0]
    for result in (inside, outside):
        assert "the process group of this Checkpointer does not exist" in result[1]


def test_a_rank_that_waits_long_in_a_restore_logs_for_which(group_outcomes: dict[object, Outcome]) -> None:
    waiting, awaited = group_outcomes["wait"].result()
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
    groups, number = [dist.new_group([0, 2]), dist.new_group([3, 1])], dist.get_rank() % 2
    own = DeviceMesh.from_group(groups[number], "cpu")
    model, optim = _trained(number, own)
    with Checkpointer(store, run=f"run-{number}", group=groups[number], writer="thread") as checkpointer:
        schedule = checkpointer.every(seconds=1000)
        for step in range(1, 4 + 2 * number):  # the groups make different calls
            schedule.due(step)
            checkpointer.save(model, optim, step, position=dist.get_rank())
        other, other_optim = _trained(7, own, steps=2)
        restored = present(checkpointer.restore(other, other_optim, position=None))
        problems = [_problem(checkpointer, nn.Linear(2 + dist.get_rank(), 2))]
        problems.append(_problem(checkpointer, model, object() if dist.get_rank() >= 2 else 0))
    dist.barrier()
    return {
        "problems": problems, "asks": checkpointer._is_first(), "step": restored.step,
        "equal": _values(model) == _values(other), "position": restored.values["position"],
        "world_size": restored.checkpoint.world_size,
    }  # fmt: skip


def one_replica(store: str, split_replicas: bool) -> dict[str, Any]:
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
