from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ckptapi.hosts import NOTE, TRAINER, AgentStore, members_file
from ckptstore import names
from ckptstore.errors import ObjectMissing
from tests.support.agents import TOKEN, meet, running_agent
from tests.support.waiting import DEADLINE_S, wait_until

KEY = "run/attempts/one/shard-00000.ckpt"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[AgentStore]:
    """An agent of one host of a run, asked by another."""
    with running_agent(tmp_path) as agent:
        meet([tmp_path], [agent])
        store = AgentStore(agent, "run", TOKEN)
        yield store
        store.close()


def agent(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "ckptd", "agent", "--store", str(folder), "--port", "0", *options]
    return subprocess.Popen([*command, "--notice-seconds", "0"])


def test_one_agent_serves_a_folder_until_no_process_needs_it(tmp_path: Path) -> None:
    (tmp_path / names.HOSTS).mkdir()
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / names.HOSTS / f"{TRAINER}{trainer.pid}").touch()
    runs = [members_file(tmp_path, run) for run in ("agent", "trainer-1")]
    for path in runs:
        path.write_bytes(b"{}")
    first = agent(tmp_path, "--idle-seconds", "0.1")
    wait_until(lambda: (tmp_path / names.HOSTS / NOTE).exists(), "the agent's note")
    assert agent(tmp_path).wait(DEADLINE_S) == 0, "the folder has one"
    assert first.poll() is None
    trainer.communicate(b"\n")
    assert first.wait(DEADLINE_S) == 0
    assert not (tmp_path / names.HOSTS / NOTE).exists()
    assert [path.read_bytes() for path in runs] == [b"{}"] * 2, "runs with these names are not its notes"


def test_ranges_sizes_and_listings(served: AgentStore) -> None:
    served.put(KEY, b"0123456789")
    served.put("run/commits/one.json", b"{}")
    for offset, length, found in ((0, 3, b"012"), (8, 5, b"89"), (10, 1, b""), (50, 1, b"")):
        buffer = memoryview(bytearray(length))
        assert served.read_into(KEY, offset, buffer) == len(found)
        assert bytes(buffer[: len(found)]) == found
    assert served.size(KEY) == 10
    assert [(info.key, info.bytes) for info in served.list("run/")] == [(KEY, 10), ("run/commits/one.json", 2)]
    assert [info.key for info in served.list("run/commits/o")] == ["run/commits/one.json"]
    assert list(served.list_folders("run/")) == ["attempts", "commits"]
    for call in (served.get, served.size, served.open_reader):
        with pytest.raises(ObjectMissing):
            call("run/attempts/two")


def test_one_of_two_creates_wins(served: AgentStore) -> None:
    assert served.put_if_absent("run/commits/one.json", b"first")
    assert not served.put_if_absent("run/commits/one.json", b"second")
    assert served.get("run/commits/one.json") == b"first"


@pytest.mark.parametrize("wrong", ["none", "another word", "another proof", "another key", "another query"])
def test_a_request_without_the_right_proof_is_refused(wrong: str, served: AgentStore) -> None:
    served.put(KEY, b"data")
    target, headers = served.signed("GET", KEY, {})
    if wrong == "none":
        headers = {}
    elif wrong == "another word":
        headers["Authorization"] = headers["Authorization"].replace("Ckptd", "Bearer")
    elif wrong == "another proof":
        headers["Authorization"] = headers["Authorization"][:-1]
    else:
        target += "/x" if wrong == "another key" else "?folders=run/"
    url = urlsplit(served.url)
    connection = HTTPConnection(url.hostname or "", url.port)
    connection.request("GET", target, headers=headers)
    answer = connection.getresponse()
    assert (answer.status, b"data" in answer.read()) == (401, False)
    connection.close()


def test_a_body_that_ends_early_leaves_nothing(served: AgentStore, tmp_path: Path) -> None:
    """Its writer was killed, or cut off."""
    url, before = urlsplit(served.url), {*tmp_path.rglob("*")}
    target, headers = served.signed("PUT", KEY, {})
    headers |= {"Transfer-Encoding": "chunked", "Host": "x"}
    head = f"PUT {target} HTTP/1.1\r\n" + "".join(f"{key}: {value}\r\n" for key, value in headers.items()) + "\r\n"
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(head.encode() + b"%x\r\n" % (9 << 20) + bytes(9 << 20))
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1) == b""
    wait_until(lambda: not [path for path in {*tmp_path.rglob("*")} - before if path.is_file()], "the end")
    with pytest.raises(ObjectMissing):
        served.get(KEY)
    served.put(KEY, b"again")
    assert served.get(KEY) == b"again"
