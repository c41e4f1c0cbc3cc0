from __future__ import annotations

import os
import random
import socket
from base64 import urlsafe_b64encode
from pathlib import Path

import httpx
import msgspec
import pytest
import zstandard

from ckptapi import bodies
from ckptapi.bodies import Phase
from ckptapi.listing import Sort
from ckptd.http.listing import read_cursor, write_cursor
from ckptd.http.middleware import MAX_HEADERS, MAX_QUERY_BYTES
from ckptstore import names
from ckptstore.errors import InvalidName, InvalidRequest, NotFound
from ckptstore.names import RunKeys
from ckptstore.stores import open_store
from tests.ckptd.conftest import Served
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import join, running_daemon
from tests.support.waiting import wait_until

ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"


def refused(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == bodies.PROBLEM
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert status != 422 or answer.json()["code"] in ("invalid_name", "invalid_request")


def test_too_many_headers_and_a_query_that_is_too_long(served: Served) -> None:
    headers = {f"X-Header-{number}": "x" for number in range(MAX_HEADERS + 1)}
    refused(served.daemon.get("/v1/runs", headers=headers), 431)
    refused(served.daemon.get("/v1/runs?" + "x" * (MAX_QUERY_BYTES + 1)), 414)


@pytest.mark.parametrize("head", [b"X-Long: " + b"x" * 200_000, b"GET / HTTP/9.9", b"\xff\xfe\x00", b"A" * 300_000])
def test_what_is_hardly_http(served: Served, head: bytes) -> None:
    host, port = served.daemon.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        try:
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n" + head + b"\r\n\r\n")
            answer = connection.recv(1000)
        except ConnectionError:
            answer = b""
        assert not answer or answer.startswith(b"HTTP/1.1 4")
    assert served.daemon.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "path",
    [f"/v1/checkpoints/{id}/{tail}" for id in ("..@1", "gpt@_", "x" * 500, "%00@1") for tail in
     ("events", "entries", "shards")] +
    ["/v1/jobs/..", "/v1/jobs/" + "x" * 300, "/v1/jobs/%00", "/v1/jobs?limit=0", "/v1/attempts?run=../x",
     "/v1/attempts?run=" + "x" * 300, "/v1/events?after=-1", "/v1/events?after=" + "9" * 40, "/v1/events?run=..",
     "/v1/events?limit=501", "/v1/checkpoints/latest?wait=61", "/v1/checkpoints/latest?wait=nan",
     "/v1/checkpoints/latest?wait=-1", "/v1/checkpoints/gpt@30/entries?offset=-1",
     "/v1/checkpoints/gpt@30/entries?limit=10001", "/v1/checkpoints/gpt@30/entries?offset=" + "9" * 30] +
    [bodies.RESTORES + rest for rest in
     ("/x", f"/{ULID}x", f"/{ULID[:-1]}", "/%2e%2e", "/%00", "?limit=0", "?limit=501", "?limit=x", "?run=../x", "?run=",
      f"/{ULID}?wait=61", f"/{ULID}?wait=-1", f"/{ULID}?wait=nan", f"/{ULID}?wait=1e400", f"/{ULID}?ranks=maybe")],
)  # fmt: skip
def test_paths_and_queries(served: Served, path: str) -> None:
    answer = served.daemon.get(path)
    assert answer.status_code in ((422,) if path.startswith(bodies.RESTORES) else (404, 422)), answer.text
    assert answer.json()["code"] in ("invalid_name", "invalid_request", "unknown_route")


def test_cursors_come_back_and_nothing_else_does() -> None:
    place = ("gpt", 3, 10, 5.5, ULID)
    text = write_cursor(Sort.RUN, place)
    assert read_cursor(text, Sort.RUN) == place
    chosen = random.Random(0)
    for _ in range(2000):
        data = bytearray(text.encode())
        data[chosen.randrange(len(data))] = chosen.randrange(256)
        try:
            found = read_cursor(data.decode("latin-1"), Sort.RUN)
        except InvalidRequest:
            continue
        assert names.check_run(found[0])
    for values in (
        ["gpt", 0, 1 << 70, 0.0, ULID], ["../x", 0, 1, 0.0, ULID], ["gpt", 0, 1, 0.0], [1, 2, 3, 4, 5],
        ["gpt", 0, -1, 0, ULID], ["gpt", -1, 1, 0, ULID],
    ):  # fmt: skip
        forged = urlsafe_b64encode(msgspec.json.encode(["run", values])).decode()
        with pytest.raises(InvalidRequest):
            read_cursor(forged, Sort.RUN)


def test_a_bomb_for_a_manifest_costs_no_memory(tmp_path: Path) -> None:
    """The manifest of a checkpoint is replaced by 64 KiB of zstd that would be gigabytes."""
    store = open_store(str(tmp_path / "store"))
    good, bad = write_checkpoint(store, "gpt", 1), write_checkpoint(store, "gpt", 2)
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    bomb = b"".join(compressor.compress(b"\0" * (1 << 20)) for _ in range(2048)) + compressor.flush()
    key = RunKeys("gpt").manifest(bad.attempt)
    store.delete_many([key])
    store.put(key, bomb)
    with running_daemon(store.url) as daemon:
        before = daemon.peak_kib()
        for tail in ("shards", "entries"):
            answer = daemon.get(f"/v1/checkpoints/{bad.id}/{tail}", timeout=60)
            refused(answer, 500)
            assert answer.json()["code"] == "corrupt"
            assert daemon.get(f"/v1/checkpoints/{good.id}/{tail}").status_code == 200
        assert daemon.peak_kib() - before < 200 << 10
        assert "Traceback" not in daemon.log()


def test_clients_that_leave_in_the_middle_cost_nothing(served: Served) -> None:
    """Hundreds of answers are not read to their end, and streams are left without a word."""
    host, port = served.daemon.url.removeprefix("http://").split(":")
    path = f"/v1/checkpoints/{served.newest.id}/shards/shard-00000.ckpt"
    descriptors = f"/proc/{served.daemon.process.pid}/fd"
    before = len(os.listdir(descriptors))
    for number in range(300):
        with socket.create_connection((host, int(port)), 10) as connection:
            accept = "text/event-stream" if number % 10 == 0 else "*/*"
            target = bodies.EVENTS if number % 10 == 0 else path
            head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n\r\n"
            connection.sendall(head.encode())
            connection.recv(10)
    wait_until(
        lambda: len(os.listdir(f"/proc/{served.daemon.process.pid}/fd")) <= before + 20, "the end of connections"
    )
    assert served.daemon.get(bodies.EVENTS).status_code == 200


_JOIN = {"run": "gpt", "key": "k", "world_size": 2, "rank": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"run": "../x"}, {"run": ""}, {"run": None}, {"key": ""}, {"key": "x" * 129}, {"key": "a b"}, {"key": "-a"},
        {"key": "a\0"}, {"world_size": 0}, {"world_size": -1}, {"world_size": bodies.MAX_WORLD_SIZE + 1},
        {"world_size": 1.5}, {"world_size": "2"}, {"rank": -1}, {"rank": 2}, {"rank": 10**30}, {"rank": True},
        {"ttl_s": 0}, {"ttl_s": 0.5}, {"ttl_s": 1e300}, {"ttl_s": -1}, {"ttl_s": "x"},
        {"checkpoint": "x"}, {"checkpoint": "../x@1"}, {"checkpoint": "bert@5"}, {"checkpoint": 7},
    ],
)  # fmt: skip
def test_joins_that_make_no_sense(served: Served, change: dict[str, object]) -> None:
    refused(served.daemon.post(bodies.RESTORES, _JOIN | change), 422)
    assert all(item["key"] == "reports" for item in served.daemon.get(bodies.RESTORES).json()["items"])


@pytest.mark.parametrize(
    "body",
    [{}, [], {"phase": "x"}, {"phase": "fetching", "done_bytes": -1}, {"phase": "fetching", "done_bytes": 1 << 60},
     {"phase": "fetching", "total_bytes": 1.5}, {"phase": "failed", "problem": 7},
     {"phase": "failed", "problem": "x" * 70_000}],
)  # fmt: skip
def test_reports_that_make_no_sense(served: Served, body: object) -> None:
    with served.daemon.client() as client:
        before = join(client, "gpt", "reports", 2, 0)
        refused(httpx.put(f"{served.daemon.url}{bodies.RESTORES}/{before.id}/ranks/1", json=body), 422)
        assert client.restore_session(before.id).num_joined == 1


def test_what_is_not_there(served: Served) -> None:
    with served.daemon.client() as client:
        asks = (
            client.restore_session, lambda id: client.restore_session(id, wait_s=5), client.cancel_restore,
            lambda id: client.report_restore(id, 0, Phase.FETCHING),
        )  # fmt: skip
        for ask in asks:
            for id, error in ((ULID, NotFound), ("../x", InvalidName)):
                with pytest.raises(error):
                    ask(id)
    for rank in ("-1", "x", str(bodies.MAX_WORLD_SIZE), "9" * 5000):
        url = f"{served.daemon.url}{bodies.RESTORES}/{ULID}/ranks/{rank}"
        refused(httpx.put(url, json={"phase": "fetching"}), 422)


def test_the_openapi_document_states_the_limits(served: Served) -> None:
    document = served.daemon.get("/openapi.json")
    put = document.json()["paths"][bodies.RESTORES + "/{id}/ranks/{rank}"]["put"]
    schema = put["requestBody"]["content"]["application/json"]["schema"]
    schemas = document.json()["components"]["schemas"]
    report = schemas[schema["$ref"].rpartition("/")[2]]
    assert sorted(schemas[report["properties"]["phase"]["$ref"].rpartition("/")[2]]["enum"]) == sorted(Phase)
    assert "$defs" not in document.text
