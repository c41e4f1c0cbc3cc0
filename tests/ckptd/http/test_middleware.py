"""Bad input gets a typed 4xx, never a 5xx, and never a traceback."""

from __future__ import annotations

from base64 import urlsafe_b64encode

import httpx
import pytest

from ckptapi import bodies
from tests.ckptd.conftest import Served
from tests.support.waiting import wait_until

_GOOD_ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"
_IDS = [
    "gpt", "gpt@", "@1", "gpt@-1", "gpt@1.x", "gpt@latest." + _GOOD_ULID, "gpt@9999999999999", "..@1", "a..b@1",
    "%2e%2e@1",
    "gpt@1%00", "gpt@%EF%BC%91", "%F0%9F%92%A9@1", "x" * 129 + "@1", "x" * 9000 + "@1", "gpt@1;DROP", "-gpt@1",
    "%ff%fe@1",
    "gpt@1." + _GOOD_ULID.replace("0", "8", 1),
]  # fmt: skip


def _refused(answer: httpx.Response, *codes: str) -> None:
    problem = answer.json()
    assert 400 <= answer.status_code < 500, answer.text
    assert (answer.headers["content-type"], problem["status"]) == (bodies.PROBLEM, answer.status_code)
    assert problem["code"] in codes, problem
    assert problem["type"] == f"urn:ckptd:error:{problem['code']}"
    assert "Traceback" not in answer.text


@pytest.mark.parametrize("id", _IDS)
@pytest.mark.parametrize("tail", ["", "/manifest", "/receipts/0", "/statistics/0", "/shards/shard-00000.ckpt"])
def test_ids(served: Served, id: str, tail: str) -> None:
    _refused(served.daemon.get(f"/v1/checkpoints/{id}{tail}"), "invalid_name", "invalid_request")


@pytest.mark.parametrize(
    "tail",
    ["shards/%2e%2e%2f%2e%2e", "shards/shard-1.ckpt", "shards/shard-00000.json", "shards/", "receipts/-1",
     "receipts/x", "receipts/100000", "receipts/" + "9" * 5000, "receipts/1e3", "nothing", "shards/%00"],
)  # fmt: skip
def test_objects(served: Served, tail: str) -> None:
    answer = served.daemon.get(f"/v1/checkpoints/{served.newest.id}/{tail}")
    _refused(answer, "invalid_name", "invalid_request", "unknown_route", "no_checkpoint")


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=501", "limit=x", "limit=-1", "limit=" + "9" * 5000, "run=", "run=../x", "run=" + "x" * 200,
     "cursor=", "cursor=x", "cursor=%00", "cursor=%E2%82%AC", "cursor=" + "A" * 600,
     "cursor=" + urlsafe_b64encode(b'{"run":"../x","step":1,"committed_at":0,"ulid":"x"}').decode(),
     "cursor=" + urlsafe_b64encode(b'{"run":"gpt","step":1e99,"committed_at":0,"ulid":"x"}').decode(),
     "cursor=" + urlsafe_b64encode(b"[" * 300).decode(),
     "run=bert&cursor=" + urlsafe_b64encode(
         b'{"run":"gpt","step":1,"committed_at":0,"ulid":"' + _GOOD_ULID.encode() + b'"}').decode()],
)  # fmt: skip
def test_listings(served: Served, query: str) -> None:
    _refused(served.daemon.get(f"/v1/checkpoints?{query}"), "invalid_name", "invalid_request")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (bodies.PRUNE, {}), (bodies.PRUNE, {"keep_last": "5"}), (bodies.PRUNE, {"keep_last": 5, "run": "../x"}),
        (bodies.PRUNE, {"keep_last": 1.5}), (bodies.PRUNE, {"keep_last": True}), (bodies.PRUNE, []),
        (bodies.NOTIFY, {"run": "gpt"}), (bodies.NOTIFY, {"run": "gpt", "attempt": "../../x"}),
        (bodies.NOTIFY, {"run": "..", "attempt": f"000000000001-{_GOOD_ULID}"}),
        (f"{bodies.RUNS}/gpt/preempt", {}), (f"{bodies.RUNS}/gpt/preempt", {"grace_s": 0}),
        (f"{bodies.RUNS}/gpt/preempt", {"grace_s": 1e300}),
        (f"{bodies.RUNS}/gpt/preempt", {"grace_s": 5, "reason": "x" * 2000}),
        (bodies.LEASES, {"id": "gpt@latest", "holder": "", "ttl_s": 5}),
        (bodies.LEASES, {"id": "gpt@latest", "holder": "x" * 300, "ttl_s": 5}),
        (bodies.LEASES, {"id": "gpt@latest", "holder": "x", "ttl_s": 0}),
        (bodies.LEASES, {"id": "gpt@latest", "holder": "x", "ttl_s": 1e300}),
        (bodies.LEASES, {"id": "../x", "holder": "x", "ttl_s": 5}),
    ],
)  # fmt: skip
def test_bodies(served: Served, path: str, body: object) -> None:
    _refused(served.daemon.post(path, body), "invalid_name", "invalid_request")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 60_000, b'{"keep_last":1}' + b" " * 70_000, b"1e999"]
)
def test_raw_bodies(served: Served, content: bytes) -> None:
    answer = httpx.post(served.daemon.url + bodies.PRUNE, content=content, headers={"Content-Type": "application/json"})
    _refused(answer, "invalid_request")


@pytest.mark.parametrize("path", [bodies.PRUNE, bodies.RESTORES])
def test_a_web_page_cannot_change_anything(served: Served, path: str) -> None:
    """Other content types cross sites without a preflight."""
    body = b'{"keep_last":1,"dry_run":false,"run":"gpt","key":"page","world_size":1,"rank":0}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = httpx.post(served.daemon.url + path, content=body, headers={"Content-Type": kind})
        _refused(answer, "invalid_request")
    assert len(served.daemon.get("/v1/checkpoints?run=gpt").json()["items"]) == 4
    assert served.daemon.get(bodies.RESTORES).json()["items"] == []


def test_unknown_routes_and_methods(served: Served) -> None:
    for path in ("/nope", "/v1", "/v1/checkpoints/", "/v1/../etc/passwd", "/redoc", "/docs/oauth2-redirect"):
        _refused(served.daemon.get(path), "unknown_route")
    answer = httpx.put(served.daemon.url + bodies.RUNS)
    _refused(answer, "method_not_allowed")
    assert answer.headers["allow"] == "GET"


def test_leases_and_their_names(served: Served) -> None:
    for path in (f"/gpt/{_GOOD_ULID[:-1]}", "/gpt/..%2fx", f"/..x/{_GOOD_ULID}", f"/{'x' * 200}/{_GOOD_ULID}"):
        answer = httpx.delete(served.daemon.url + bodies.LEASES + path)
        _refused(answer, "invalid_name", "invalid_request", "unknown_route")


def test_a_request_id_is_ours_unless_it_is_harmless(served: Served) -> None:
    assert served.daemon.get("/livez", headers={"X-Request-ID": "trainer-7"}).headers["x-request-id"] == "trainer-7"
    assert len(served.daemon.get("/nope", headers={"X-Request-ID": "x y"}).headers["x-request-id"]) == 32


def test_a_path_cannot_forge_a_log_line(served: Served) -> None:
    served.daemon.get("/v1/a%0a2026-01-01%20INFO%20forged")
    wait_until(lambda: "/v1/a%0A2026-01-01" in served.daemon.log(), "the log line")
    assert "\n2026-01-01 INFO forged" not in served.daemon.log()


def test_unknown_methods_share_one_metric_and_are_cut_in_the_log(served: Served) -> None:
    """Otherwise each request with a new method of 60 KB would cost memory for good."""
    path = "/v1/of-unknown-methods"
    for letter in "BCD":
        assert httpx.request(letter * 60_000, served.daemon.url + path).status_code in (404, 405)
    metrics = served.daemon.get("/metrics").text
    assert 'method="other"' in metrics
    assert "BBBB" not in metrics
    wait_until(lambda: "D" * 16 + f" {path}" in served.daemon.log(), "the log line")
    assert "D" * 17 not in served.daemon.log()
