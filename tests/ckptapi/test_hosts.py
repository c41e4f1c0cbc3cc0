from __future__ import annotations

import http.client
import http.server
import logging
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from ckptapi.hosts import (
    PROOF,
    Agent,
    AgentStore,
    HostsStore,
    PeerShards,
    copy_missing_shards,
    is_shard,
    limits,
    members_file,
    open_local,
    proof,
)
from ckptapi.opening import open_source
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject, ObjectMissing, StoreFull, StoreUnavailable
from ckptstore.names import Attempt, RunKeys
from ckptstore.reading.source import StoreSource
from ckptstore.retention.scrubbing import scrub
from ckptstore.stores.local import LocalStore
from tests.support.agents import TOKEN, meet, running_agent, running_hosts
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.command_line import invoke

KEYS = RunKeys("run")
ATTEMPT = Attempt(5, "01HZY3K0000000000000000000", generation=1)
SHARD = KEYS.shard(ATTEMPT, "shard-00000.ckpt")
OUTCOME = KEYS.outcome(ATTEMPT)
DATA = bytes(range(256)) * 20_000  # more than a block of a copy


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[HostsStore]]:
    with running_hosts(tmp_path) as stores:
        yield stores


def holders(hosts: list[HostsStore], key: str) -> list[int]:
    return [number for number, store in enumerate(hosts) if (store.own.root / key).exists()]


def write(store: HostsStore, key: str, data: bytes = DATA) -> None:
    with store.open_writer(key, len(data)) as writer:
        writer.write(data[:1000])
        writer.write(data[1000:])


def test_a_shard_lies_on_its_host_and_the_next_one_and_is_read_on_all(hosts: list[HostsStore]) -> None:
    write(hosts[2], SHARD)
    assert holders(hosts, SHARD) == [0, 2]
    for store in hosts:
        assert store.get(SHARD) == DATA
        assert store.size(SHARD) == len(DATA)
        assert [info.key for info in store.list(KEYS.attempts)] == [SHARD]
        assert list(store.list_folders(KEYS.attempts)) == [str(ATTEMPT)]
        with store.open_reader(SHARD) as reader:
            part = memoryview(bytearray(700))
            reader.read(300, part)
        assert part == DATA[300:1000]
    hosts[1].delete_many([SHARD])
    assert holders(hosts, SHARD) == []
    with pytest.raises(ObjectMissing):
        hosts[0].get(SHARD)


def test_documents_lie_on_the_first_host_and_the_next_one(hosts: list[HostsStore]) -> None:
    hosts[2].put(KEYS.receipt(ATTEMPT, 2), b"receipt")
    assert holders(hosts, KEYS.receipt(ATTEMPT, 2)) == [0, 1]
    assert {store.get(KEYS.receipt(ATTEMPT, 2)) for store in hosts} == {b"receipt"}
    assert [[info.key for info in store.list(KEYS.thousand(ATTEMPT, 0))] for store in hosts] == [
        [KEYS.receipt(ATTEMPT, 2)]
    ] * 3


def test_one_of_several_hosts_that_decide_at_once_wins(hosts: list[HostsStore]) -> None:
    won: list[int] = []

    def decide(number: int) -> None:
        if hosts[number].put_if_absent(OUTCOME, str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = won
    assert {store.get(OUTCOME) for store in hosts} == {str(winner).encode()}
    assert holders(hosts, OUTCOME) == [0, 1]


def test_a_creator_that_loses_completes_the_copies_of_the_winner(hosts: list[HostsStore]) -> None:
    """The winner may have ended between its create and its copies."""
    hosts[0].own.put_if_absent(OUTCOME, b"first")
    assert not hosts[2].put_if_absent(OUTCOME, b"second")
    assert hosts[1].own.get(OUTCOME) == b"first"


def test_what_a_killed_host_held_is_on_others(tmp_path: Path) -> None:
    with running_hosts(tmp_path, 2) as others, running_agent(tmp_path / "2") as agent:
        known = others[0].group("run/")
        assert known is not None
        folders = [tmp_path / str(number) for number in range(3)]
        hosts = meet(folders, [*known.members.hosts, agent])
        write(hosts[2], SHARD)
        hosts[2].put(OUTCOME, b"decided")
    with running_agent(tmp_path / "1") as agent:  # where neither of the two others answers
        [store] = meet([tmp_path / "1"], [agent])
        assert store.get(OUTCOME) == b"decided"
        with pytest.raises(ObjectMissing):
            store.get(SHARD)


def test_a_host_that_does_not_answer_is_passed_over_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_agent(tmp_path / "0") as first, running_agent(tmp_path / "2") as last:
        with running_agent(tmp_path / "1") as gone:
            pass
        hosts = meet([tmp_path / "0", tmp_path / "2"], [first, gone, last])
        with caplog.at_level(logging.WARNING):
            write(hosts[0], SHARD)
        assert holders(hosts, SHARD) == [0, 1], "on the host after the one that is gone"
        [elsewhere] = caplog.messages
        assert "lies on 1 other hosts and not on the next ones" in elsewhere
        hosts[0].put(OUTCOME, b"decided")
        hosts[0].put(KEYS.manifest(ATTEMPT), b"manifest")
        assert hosts[1].get(OUTCOME) == b"decided"
    [_, warning] = caplog.messages
    assert "lies on 0 other hosts and not on 1" in warning, "once, for both documents"


def test_documents_need_the_host_that_decides(tmp_path: Path) -> None:
    with running_agent(tmp_path / "0") as gone:
        pass
    with running_agent(tmp_path / "1") as other:
        [store] = meet([tmp_path / "1"], [gone, other])
        with pytest.raises(StoreUnavailable, match="agent of 0"):
            store.put_if_absent(OUTCOME, b"decided")
        write(store, SHARD)
        assert store.get(SHARD) == DATA


@pytest.mark.parametrize("wrong", ["token", "folder", "run"])
def test_only_hosts_of_the_run_are_answered_and_believed(wrong: str, tmp_path: Path) -> None:
    with running_hosts(tmp_path, 1) as [store]:
        group = store.group("run/")
        assert group is not None
        agent = group.members.hosts[0]
        store.put(OUTCOME, b"decided")
        if wrong == "folder":
            agent = type(agent)("another", agent.url, agent.host)
        other = AgentStore(agent, "other" if wrong == "run" else "run", "wrong" if wrong == "token" else TOKEN)
        with pytest.raises(StoreUnavailable, match="does not know the token"):
            other.get(OUTCOME)
        assert not other.answers()


def test_an_agent_that_ends_after_its_proof_is_unavailable(tmp_path: Path) -> None:
    class Ending(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header(PROOF, proof(TOKEN, self.headers["Authorization"].split()[2], "id"))
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Ending) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        store = AgentStore(Agent("id", f"http://127.0.0.1:{server.server_port}", "host"), "run", TOKEN)
        with pytest.raises(StoreUnavailable, match="agent of host"):
            store.get(OUTCOME)


@pytest.mark.parametrize(
    "key", ["other/commits/x.json", "_hosts/run.json", "run/../_hosts/run.json", "/etc/passwd", ""]
)
def test_a_token_opens_the_objects_of_its_run_only(key: str, hosts: list[HostsStore]) -> None:
    group = hosts[0].group("run/")
    assert group is not None
    agent = AgentStore(group.members.hosts[1], "run", TOKEN)
    calls = (agent.get, lambda key: agent.put(key, b""), lambda key: agent.delete_many([key]), agent.list)
    for call in (*calls[0 if key else 1 :], agent.list_folders):
        with pytest.raises(StoreUnavailable, match="answers 401"):
            call(key)


def test_a_copy_that_is_damaged_is_passed_over_for_the_next_one(hosts: list[HostsStore], tmp_path: Path) -> None:
    for number in range(3):
        hosts[number].own.put(SHARD, str(number).encode())
    checkpoint = Checkpoint("run", ATTEMPT, State.COMMITTED)
    read = [PeerShards(hosts[0], number).open_shard(checkpoint, "shard-00000.ckpt") for number in range(2)]
    assert [bytes(reader.read_once(0, 1)) for reader in read] == [b"1", b"2"]
    with pytest.raises(CorruptObject):
        read[0].read_once(0, 2)
    with pytest.raises(ObjectMissing):
        PeerShards(hosts[0], 2).open_shard(checkpoint, "shard-00000.ckpt")


def test_a_copy_whose_bytes_changed_on_the_way_is_made_on_another_host(
    hosts: list[HostsStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that answers with another digest wrote other bytes."""
    group = hosts[0].group("run/")
    assert group is not None
    send = http.client.HTTPConnection.send
    port = int(group.members.hosts[1].url.rpartition(":")[2])

    def flipped(connection: http.client.HTTPConnection, data: Any) -> None:
        send(connection, b"\0" * len(data) if connection.port == port and len(data) > 1000 else data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", flipped)
    write(hosts[0], SHARD)
    assert hosts[2].own.get(SHARD) == DATA


def test_a_writer_that_is_left_by_an_error_leaves_nothing(hosts: list[HostsStore]) -> None:
    def fail() -> None:
        with hosts[0].open_writer(SHARD) as writer:
            writer.write(DATA)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert holders(hosts, SHARD) == []


def test_an_idle_connection_that_the_agent_has_closed_costs_no_copy(
    hosts: list[HostsStore], caplog: pytest.LogCaptureFixture
) -> None:
    group = hosts[0].group("run/")
    assert group is not None
    agent = group.ring[0]
    assert isinstance(agent, AgentStore)
    assert agent.answers()
    [idle] = agent._idle
    assert idle.sock is not None
    idle.sock.shutdown(socket.SHUT_RDWR)
    with caplog.at_level(logging.WARNING):
        write(hosts[0], SHARD)
    assert holders(hosts, SHARD) == [0, 1]
    assert not caplog.messages


def test_a_peer_whose_disk_is_full_says_so(
    hosts: list[HostsStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = LocalStore.open_replacement

    def full(store: LocalStore, key: str, size_hint: int = 0) -> Any:
        if store.root == hosts[1].own.root:
            raise StoreFull("no space is left")
        return opened(store, key, size_hint)

    monkeypatch.setattr(LocalStore, "open_replacement", full)
    with caplog.at_level(logging.WARNING), hosts[0].open_writer(SHARD) as writer:
        for _ in range(20):
            writer.write(DATA)
    assert holders(hosts, SHARD) == [0, 2]
    assert ["the disk of 1 is full" in message for message in caplog.messages] == [True]


def test_a_store_follows_a_job_that_begins_and_waits_while_its_hosts_meet(
    hosts: list[HostsStore], tmp_path: Path
) -> None:
    """As the saver of a killed job does: the first host may be another one now."""
    hosts[2].put(OUTCOME, b"decided")
    group = hosts[2].group("run/")
    assert group is not None
    file = members_file(tmp_path / "2", "run")
    for meeting in (True, False):
        new = file.with_name("new")
        new.write_bytes(msgspec.json.encode(replace(group.members, hosts=group.members.hosts[::-1], meeting=meeting)))
        new.replace(file)
        if meeting:
            for call in (
                hosts[2].get,
                lambda key: hosts[2].put_if_absent(key, b"again"),
                hosts[2].list,
                lambda key: hosts[2].delete_many([key]),
            ):
                with pytest.raises(StoreUnavailable, match="have not met yet"):
                    call(OUTCOME)
    assert hosts[2].put_if_absent(KEYS.manifest(ATTEMPT), b"manifest")
    assert holders(hosts, KEYS.manifest(ATTEMPT)) == [1, 2]


def test_a_run_without_other_hosts_is_in_its_folder(tmp_path: Path) -> None:
    store = open_local(f"file://{tmp_path}")
    assert isinstance(store, HostsStore)
    write(store, SHARD)
    store.put(OUTCOME, b"decided")
    assert not store.put_if_absent(OUTCOME, b"again")
    plain = LocalStore(str(tmp_path))
    assert [*store.list("run/")] == [*plain.list("run/")]
    assert [*store.list_folders("")] == ["run"]
    assert store.on_this_host == plain.on_this_host
    store.delete_many([SHARD, OUTCOME])
    assert [*plain.list("run/")] == []


def test_a_shard_that_is_damaged_on_this_host_is_healed_by_others(hosts: list[HostsStore]) -> None:
    """The host that scrubs has no documents."""
    written = write_checkpoint(hosts[2], "run", 5)
    key = next(info.key for info in hosts[2].list(KEYS.attempts) if is_shard(info.key))
    path = hosts[2].own.root / key
    intact = path.read_bytes()
    path.write_bytes(bytes(byte ^ 0xFF for byte in intact))
    store = HostsStore(hosts[2].own)
    [found] = scrub(store, [written], "me", system_clock, heal_from=())
    assert (found.ok, found.healed) == (True, (key,))
    assert path.read_bytes() == intact


def test_the_folder_of_one_host_opens_as_the_store_of_all(hosts: list[HostsStore]) -> None:
    """ckptctl ls, verify, pin and cp --store FOLDER."""
    write(hosts[0], SHARD)
    hosts[0].put(OUTCOME, b"decided")
    source = open_source(hosts[2].own.url)
    assert isinstance(source, StoreSource)
    assert source.store.get(OUTCOME) == b"decided"
    assert source.store.get(SHARD) == DATA
    assert "run" in source.store.list_folders("")
    assert not source.store.on_this_host


def test_a_host_in_the_place_of_a_lost_one_gets_the_shards_that_it_must_hold(tmp_path: Path) -> None:
    other = KEYS.shard(ATTEMPT, "shard-00001.ckpt")
    with running_hosts(tmp_path, 4) as hosts:
        write(hosts[0], SHARD)
        write(hosts[1], other)
        shutil.rmtree(hosts[1].own.root / "run")
        assert (holders(hosts, SHARD), holders(hosts, other)) == ([0], [2])
        for store in hosts:
            copy_missing_shards(store.url, [SHARD, other, OUTCOME])
        assert (holders(hosts, SHARD), holders(hosts, other)) == ([0, 1], [2, 3])
        assert hosts[3].own.get(other) == DATA
        for number in (0, 1):
            (hosts[number].own.root / SHARD).unlink()
        for store in hosts:
            copy_missing_shards(store.url, [SHARD])
        assert holders(hosts, SHARD) == [], "no host has it"


def test_a_document_that_no_host_can_be_asked_about_is_not_missing(tmp_path: Path) -> None:
    with running_agent(tmp_path / "0") as first, running_agent(tmp_path / "1") as second:
        pass
    with running_agent(tmp_path / "2") as last:
        [store] = meet([tmp_path / "2"], [first, second, last])
        with pytest.raises(StoreUnavailable):
            store.find(OUTCOME)
        assert store.find(SHARD) is None, "it would be on this host or on one that is gone"


def test_the_only_host_of_a_job_has_no_copies_elsewhere(tmp_path: Path) -> None:
    with running_hosts(tmp_path, 1) as [store]:
        write(store, SHARD)
        [elsewhere] = store.elsewhere
        assert [*elsewhere.list(KEYS.attempts)] == [*store.list(KEYS.attempts)]
        with pytest.raises(ObjectMissing):
            elsewhere.get(SHARD)


def test_hosts_that_cannot_be_read_are_not_those_of_a_run_on_this_host_alone(tmp_path: Path) -> None:
    """It would decide by itself."""
    with running_hosts(tmp_path, 1) as [store]:
        file = members_file(tmp_path / "0", "run")
        file.unlink()
        file.mkdir()
        with pytest.raises(IsADirectoryError):
            store.put_if_absent(OUTCOME, b"decided")


def test_what_a_local_tier_does_not_survive_is_said(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        [memory] = limits(LocalStore(folder), 1)
        assert next(limits(LocalStore(folder), 0)) == memory
    assert "is in memory: what is saved there lasts as long as its host runs" in memory
    disk = LocalStore(str(tmp_path))
    disk.kind = "ext4"  # wherever tests have their folders
    assert [*limits(disk, 1)] == []
    [none] = limits(disk, 0)
    assert "survives restarts, not the loss of a host" in none


@pytest.mark.parametrize("replicas", [0, 1])
def test_ls_says_what_a_local_tier_does_not_survive(replicas: int, tmp_path: Path) -> None:
    with running_hosts(tmp_path / "hosts", 2, replicas) as [one, _]:
        write_checkpoint(one, "run", 1, SMALL)
        (tmp_path / "far").mkdir()
        done = invoke("ls", "run", "--store", str(tmp_path / "far"), "--local", one.own.url)
    assert done.code == 0, done.stderr
    assert ("not the loss of a host" in " ".join(done.stderr.split())) == (not replicas)
