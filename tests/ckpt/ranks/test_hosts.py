from __future__ import annotations

import json
import logging
import os
import signal
import socket
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.ranks.hosts import _answering, agent_url, agreed, check_lost, copy_documents, own_address
from ckptapi.hosts import NOTE, TRAINER, Agent, HostsStore, Members
from ckptstore import names
from ckptstore.errors import InvalidRequest, StoreUnavailable, StoreUnsafe
from ckptstore.names import Attempt, RunKeys
from ckptstore.stores import open_store
from ckptstore.stores.local import LocalStore
from ckptstore.tiers.source import TieredSource
from tests.support.agents import meet, running_agent, running_hosts
from tests.support.waiting import wait_until

A, B, C, D = (Agent(name * 3, f"http://{name}:1", name) for name in "abcd")
KEYS = RunKeys("run")
ATTEMPT = Attempt(5, "01HZY3K0000000000000000000", generation=1)


def test_hosts_are_numbered_by_their_lowest_ranks_and_those_of_before_are_remembered() -> None:
    before = Members(6, "old", 1, (A, B, C), ())
    stale = Members(3, "older", 0, (D, A), ())
    fresh = Agent("new", B.url, "b")
    members, newest = agreed([C, C, fresh, D], [before, Members(), stale], "r0", 2)
    assert members == Members(7, "old", 2, (C, fresh, D), (A,)), "the host in B's place has its address"
    assert newest == before
    assert agreed([A, B], [Members()], "r0", 0)[0] == Members(1, "r0", 0, (A, B), ())


def test_a_folder_that_is_a_copy_of_another_hosts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="of a has the id of another host's"):
        agreed([A, Agent(A.id, B.url, "b")], [Members()], "", 1)


def test_pods_of_one_host_share_its_folder_and_agent() -> None:
    pod = Agent(A.id, A.url, "another pod")
    assert agreed([A, pod, B], [Members()], "", 1)[0].hosts == (pod, B)


def test_the_agent_is_started_once_and_again_if_it_is_killed(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "tier"))
    store.put("_probes/x", b"")
    url = agent_url(store.root, store.url)
    assert agent_url(store.root, store.url) == url
    assert (store.root / names.HOSTS / f"{TRAINER}{os.getpid()}").exists()
    note = store.root / names.HOSTS / NOTE
    noted = json.loads(note.read_bytes())
    assert noted["url"] == url
    note.write_text(json.dumps({**noted, "boot": "of another host"}))
    assert _answering(note.parent) is None, "the folder is a copy, or hosts share it"
    note.write_text(json.dumps(noted))
    from ckpt.ranks.hosts import _started

    [agent] = [one for one in _started if one.poll() is None]
    process = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    killed = int(process.read_text())
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: int(process.read_text() or killed) != killed, "another agent")
    wait_until(lambda: _answering(note.parent) == url, "another agent with the address of the first")
    os.killpg(agent.pid, signal.SIGTERM)
    wait_until(lambda: agent.poll() is not None, "the agent's end")
    wait_until(lambda: not note.exists(), "the agent's end")


def test_an_agent_that_cannot_serve_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_near").mkdir()
    (tmp_path / "_near" / "id").mkdir()
    with pytest.raises(InvalidRequest, match="ended with exit status"):
        agent_url(tmp_path, f"file://{tmp_path}")


def test_the_address_is_that_by_which_the_first_host_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "no such name")
    assert own_address() == "127.0.0.1"


def test_the_first_host_of_several_has_an_address_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name often means a loopback address there, where each other host has its own agent."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as reaching:
        try:
            reaching.connect(("192.0.2.1", 9))
        except OSError:
            assert own_address() == "127.0.0.1", "this machine has no network"
            return
        assert own_address() == reaching.getsockname()[0]


def test_a_host_gets_the_documents_that_it_lacks(tmp_path: Path) -> None:
    with running_hosts(tmp_path) as hosts:
        shard = KEYS.shard(ATTEMPT, "shard-00000.ckpt")
        group = hosts[0].group("run/")
        assert group is not None
        for key, data in ((KEYS.outcome(ATTEMPT), b"decided"), (KEYS.generation(1), b"one"), (shard, b"bytes")):
            hosts[1].own.put(key, data)
        own = hosts[0].own
        copy_documents(group.hosts[1], own, "run")
        assert own.get(KEYS.outcome(ATTEMPT)) == b"decided"
        assert own.find(shard) is None
        copy_documents(group.hosts[1], own, "run")
        hosts[1].own.put(KEYS.generation(1), b"another")
        with pytest.raises(StoreUnsafe, match="two jobs of run 'run' saved without each other"):
            copy_documents(group.hosts[1], own, "run")


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_lost_hosts_than_replicas_are_named(
    replicas: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_agent(tmp_path / "0") as agent:
        [local] = meet([tmp_path / "0"], [agent])
        before, now = Members(1, "", replicas, (agent, B, C)), Members(2, "", replicas, (agent,))
        remote = open_store(str(tmp_path / "remote"))
        source = TieredSource(local, remote, remote)
        with caplog.at_level(logging.WARNING):
            check_lost(source, "run", now, before)
        assert ["2 of the 3 hosts" in message and "(b, c)" in message for message in caplog.messages] == [True] * (
            2 - replicas
        )
        remote.must_exist = True
        if replicas == 1:
            with pytest.raises(StoreUnavailable, match="there is no folder"):
                check_lost(source, "run", now, before)


@pytest.mark.parametrize("settings", [{}, {"local": "memory://near"}, {"local": "near", "replicas": -1}])
def test_replicas_need_a_folder(settings: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="replicas="):
        Checkpointer(str(tmp_path / "far"), run="run", **{"replicas": 1, **settings})  # type: ignore[arg-type]


def test_a_job_of_one_host_saves_and_restores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    tier = f"file://{tmp_path / 'tier'}"
    for step in (1, 2):
        model = torch.nn.Linear(2, 2)
        with Checkpointer(str(tmp_path / "far"), run="run", local=tier, replicas=0) as checkpointer:
            restored = checkpointer.restore(model)
            assert (restored.step if restored else 0) == step - 1
            checkpointer.save(model, None, step)
            assert isinstance(checkpointer._source, TieredSource)
            assert isinstance(checkpointer._source.local.store, HostsStore)
    assert "survives restarts, not the loss of a host" in caplog.text
    from ckpt.ranks.hosts import _started

    for agent in _started:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGTERM)
        agent.wait()


def test_an_agent_that_other_hosts_cannot_reach_is_refused() -> None:
    """Debian gives the name of a host a loopback address."""
    alone = Agent("x", "http://127.0.1.1:5", "x")
    assert agreed([alone] * 2, [Members()], "r", 1)[0].hosts == (alone,)
    with pytest.raises(InvalidRequest, match="agents of x listen on a loopback address"):
        agreed([A, alone], [Members()], "r", 1)


def test_the_newest_checkpoint_is_not_known_before_the_hosts_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = f"file://{tmp_path / 'tier'}"
    with Checkpointer(str(tmp_path / "far"), run="run", local=tier, replicas=1) as checkpointer:
        world = checkpointer._world()
        world.size = 2
        monkeypatch.setattr(checkpointer._saves, "_world", lambda: world)
        with pytest.raises(InvalidRequest, match="have not met"):
            checkpointer.latest()
