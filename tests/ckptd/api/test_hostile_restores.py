"""Restore sessions and bad input: a typed 4xx, and nothing has changed."""

from __future__ import annotations

import httpx
import pytest

from ckptapi import bodies
from ckptapi.bodies import Phase
from ckptstore.errors import InvalidName, NotFound
from tests.ckptd.conftest import Served

_GOOD_ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"

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
    _refused(served.daemon.post(bodies.RESTORES, _JOIN | change))
    assert all(item["key"] == "reports" for item in served.daemon.get(bodies.RESTORES).json()["items"])


@pytest.mark.parametrize(
    "body",
    [{}, [], {"phase": "x"}, {"phase": "fetching", "done_bytes": -1}, {"phase": "fetching", "done_bytes": 1 << 60},
     {"phase": "fetching", "total_bytes": 1.5}, {"phase": "failed", "problem": 7},
     {"phase": "failed", "problem": "x" * 70_000}],
)  # fmt: skip
def test_reports_that_make_no_sense(served: Served, body: object) -> None:
    with served.daemon.client() as client:
        before = client.join_restore("gpt", "reports", 2, 0)
        _refused(httpx.put(f"{served.daemon.url}{bodies.RESTORES}/{before.id}/ranks/1", json=body))
        assert client.restore_session(before.id).num_joined == 1


@pytest.mark.parametrize(
    "path",
    ["/x", f"/{_GOOD_ULID}x", f"/{_GOOD_ULID[:-1]}", "/%2e%2e", "/%00", "?limit=0", "?limit=501", "?limit=x",
     "?run=../x", "?run=", f"/{_GOOD_ULID}?wait=61", f"/{_GOOD_ULID}?wait=-1", f"/{_GOOD_ULID}?wait=nan",
     f"/{_GOOD_ULID}?wait=1e400", f"/{_GOOD_ULID}?ranks=maybe"],
)  # fmt: skip
def test_questions_that_make_no_sense(served: Served, path: str) -> None:
    _refused(served.daemon.get(bodies.RESTORES + path))


def test_what_is_not_there(served: Served) -> None:
    with served.daemon.client() as client:
        for id, error in ((_GOOD_ULID, NotFound), ("../x", InvalidName)):
            with pytest.raises(error):
                client.restore_session(id)
            with pytest.raises(error):
                client.restore_session(id, wait_s=5)
            with pytest.raises(error):
                client.report_restore(id, 0, Phase.FETCHING)
            with pytest.raises(error):
                client.cancel_restore(id)
    report = {"phase": "fetching"}
    for rank in ("-1", "x", str(bodies.MAX_WORLD_SIZE), "9" * 5000):
        _refused(httpx.put(f"{served.daemon.url}{bodies.RESTORES}/{_GOOD_ULID}/ranks/{rank}", json=report))


def test_a_web_page_cannot_join(served: Served) -> None:
    answer = httpx.post(served.daemon.url + bodies.RESTORES, content=b"{}", headers={"Content-Type": "text/plain"})
    _refused(answer)


def _refused(answer: httpx.Response) -> None:
    assert answer.status_code == 422, answer.text
    assert answer.headers["content-type"] == bodies.PROBLEM
    assert answer.json()["code"] in ("invalid_name", "invalid_request")


def test_the_openapi_document_states_the_limits(served: Served) -> None:
    document = served.daemon.get("/openapi.json")
    put = document.json()["paths"][bodies.RESTORES + "/{id}/ranks/{rank}"]["put"]
    schema = put["requestBody"]["content"]["application/json"]["schema"]
    schemas = document.json()["components"]["schemas"]
    report = schemas[schema["$ref"].rpartition("/")[2]]
    assert sorted(schemas[report["properties"]["phase"]["$ref"].rpartition("/")[2]]["enum"]) == sorted(Phase)
    assert "$defs" not in document.text
