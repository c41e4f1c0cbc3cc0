from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from ckptapi import bodies
from ckptapi.bodies import Scope, TokenRequest
from ckptd.http.access import RULES, in_body
from ckptd.http.middleware import MAX_FAILURES, WINDOW_S, Throttle
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import Denied, Forbidden, TooManyFailures, Unauthorized
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

_BOOTSTRAP = "correct horse battery staple"
_ULID = "01HF7YAT00ABCDEFGHJKMNPQRS"
_ELSEWHERE = ("/healthz", "/livez", "/readyz", "/metrics", "/checkpoints/latest")
_API = {key: rule for key, rule in RULES.items() if key[1].startswith("/v1/") or key[1] in _ELSEWHERE}
_SCOPED = sorted((key, rule) for key, rule in _API.items() if rule.scope is not None)
each_scoped = pytest.mark.parametrize(("key", "rule"), _SCOPED, ids=[" ".join(key) for key, _ in _SCOPED])


@dataclass(frozen=True, slots=True)
class Guarded:
    """A daemon that asks for tokens, over one checkpoint each of the runs gpt-a and bert."""

    daemon: Daemon
    mine: Checkpoint
    other: Checkpoint
    http: httpx.Client
    secrets: dict[str, str] = field(default_factory=dict)

    def ask(self, token: str, method: str, path: str, **options: Any) -> httpx.Response:
        """One request with the token of this name."""
        headers = {"Authorization": f"Bearer {self.secrets[token]}", **options.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **options)

    def code(self, token: str, method: str, path: str, **options: Any) -> str:
        """The code of the problem it is answered with; empty if it is none."""
        answer = self.ask(token, method, path, **options)
        return str(answer.json()["code"]) if answer.is_error else ""


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    store = open_store(str(tmp_path_factory.mktemp("guarded") / "store"))
    mine, other = (write_checkpoint(store, run, step=1) for run in ("gpt-a", "bert"))
    environment = {**os.environ, "CKPTD_TOKEN": _BOOTSTRAP}
    # With tokens it may listen beyond loopback.
    with (
        running_daemon(store.url, options=("--host", "0.0.0.0"), environment=environment) as daemon,
        httpx.Client(base_url=daemon.url, timeout=60) as http,
    ):
        guarded = Guarded(daemon, mine, other, http, {"bootstrap": _BOOTSTRAP})
        with daemon.client(_BOOTSTRAP) as client:
            for scope in Scope:
                guarded.secrets[scope] = client.create_token(TokenRequest(name=scope, scopes=[scope])).secret
            all_but_admin: list[Scope] = [scope for scope in Scope if scope is not Scope.ADMIN]
            bound = TokenRequest(name="bound", scopes=all_but_admin, runs=["gpt-*"])
            guarded.secrets["bound"] = client.create_token(bound).secret
        yield guarded


def test_every_endpoint_has_a_rule_and_every_rule_an_endpoint(guarded: Guarded) -> None:
    paths = guarded.ask("bootstrap", "GET", "/openapi.json").json()["paths"]
    endpoints = {(method.upper(), path) for path, methods in paths.items() for method in methods if method != "head"}
    assert endpoints == set(_API)


def test_everything_but_the_probes_asks_for_a_token(guarded: Guarded) -> None:
    for path in ("/livez", "/readyz"):
        assert guarded.daemon.get(path).status_code == 200
    for path in ("/openapi.json", "/nope", "/livez/", "//livez", *(path for (_, path), _ in _SCOPED)):
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            answer = guarded.http.request(method, guarded.daemon.url + path)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"


def test_no_wrong_token_is_let_in(store: Store) -> None:
    write_checkpoint(store, step=1)
    environment = {**os.environ, "CKPTD_TOKEN": _BOOTSTRAP}
    wrong = (
        _BOOTSTRAP, f"Bearer {_BOOTSTRAP}x", "Bearer", f"bearer  {_BOOTSTRAP}", "Basic eDp5",
        "Bearer ckptd_x_" + "0" * 64,
    )  # fmt: skip
    with running_daemon(store.url, environment=environment) as daemon:
        for given in wrong:
            answer = daemon.get("/checkpoints/latest", headers={"Authorization": given})
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized"), given


@each_scoped
def test_each_endpoint_asks_for_its_scope_and_nothing_less(guarded: Guarded, key: tuple[str, str], rule: Any) -> None:
    method, path = key
    path = _filled(path, "nobody", f"nobody@1.{_ULID}")  # an admin's request is carried out
    for scope in Scope:
        code = guarded.code(scope, method, path)
        assert (code == "forbidden") is (scope not in (rule.scope, Scope.ADMIN)), (scope, code)


@each_scoped
def test_a_bound_token_gets_nowhere_with_another_run(guarded: Guarded, key: tuple[str, str], rule: Any) -> None:
    method, path = key
    filled = _filled(path, guarded.other.run, guarded.other.id)
    bodies: list[Any] = [None]
    if rule.run is in_body:
        bodies = [{"run": "bert"}, {"id": guarded.other.id}, {}, {"run": None}, {"run": "*"}]
    for body, query in itertools.product(bodies, ("?run=bert", "?run=gpt-a&run=bert", "?run=BERT", "")):
        answer = guarded.ask("bound", method, filled + query, json=body)
        assert guarded.other.attempt.ulid not in answer.text, (body, query)
        if not (rule.filters and answer.is_success):
            assert answer.status_code in (403, 404, 422), (body, query, answer.text)


def test_a_bound_token_does_its_work_on_its_own_run(guarded: Guarded) -> None:
    def works(method: str, path: str, **options: Any) -> Any:
        answer = guarded.ask("bound", method, path, **options)
        assert answer.is_success, answer.text
        return answer.json() if answer.headers.get("content-type") == "application/json" else answer.content

    run, id = guarded.mine.run, guarded.mine.id
    assert works("GET", f"/checkpoints/latest?run={run}")["id"] == id
    assert [item["id"] for item in works("GET", bodies.CHECKPOINTS)["items"]] == [id]
    assert [item["id"] for item in works("GET", f"{bodies.CHECKPOINTS}?run=*")["items"]] == [id]
    assert [item["run"] for item in works("GET", bodies.RUNS)["items"]] == [run]
    for part in ("", "/manifest", "/shards/shard-00000.ckpt", "/shards", "/entries"):
        works("GET", f"{bodies.CHECKPOINTS}/{id}{part}")
    works("POST", bodies.NOTIFY, json={"run": run, "attempt": str(guarded.mine.attempt)})
    works("POST", f"{bodies.RUNS}/{run}/preempt", json={"grace_s": 30})
    lease = works("POST", bodies.LEASES, json={"id": id, "holder": "h", "ttl_s": 60})["lease"]
    works("DELETE", f"{bodies.LEASES}/{run}/{lease}")
    restore = works("POST", bodies.RESTORES, json={"run": run, "key": "k", "world_size": 1, "rank": 0, "ttl_s": 60})
    works("GET", f"{bodies.RESTORES}/{restore['id']}")
    works("DELETE", f"{bodies.RESTORES}/{restore['id']}")
    works("POST", bodies.PRUNE, json={"keep_last": 5, "run": run})
    with guarded.daemon.client(guarded.secrets["bound"]) as client, pytest.raises(Forbidden, match="gpt-"):
        client.latest("bert")


def test_head_requires_what_get_requires(guarded: Guarded) -> None:
    for path in (
        f"/checkpoints/latest?run={guarded.other.run}",
        f"{bodies.CHECKPOINTS}/{guarded.other.id}",
        "/metrics",
    ):
        assert guarded.http.head(path).status_code == 401
        assert guarded.ask("bound", "HEAD", path).status_code == 403
    assert guarded.ask("bound", "HEAD", f"/checkpoints/latest?run={guarded.mine.run}").status_code == 200


def test_ids_of_another_runs_restores_and_jobs_are_refused(guarded: Guarded) -> None:
    body = {"run": "bert", "key": "k", "world_size": 1, "rank": 0, "ttl_s": 60}
    restore = guarded.ask("read", "POST", bodies.RESTORES, json=body).json()["id"]
    job = guarded.ask("read", "POST", bodies.JOBS, json={"kind": "verify", "run": "bert"}).json()["id"]
    for method, path in (
        ("GET", f"{bodies.RESTORES}/{restore}"), ("DELETE", f"{bodies.RESTORES}/{restore}"),
        ("GET", f"{bodies.JOBS}/{job}"), ("DELETE", f"{bodies.JOBS}/{job}"),
    ):  # fmt: skip
        assert guarded.code("bound", method, path) == "forbidden"
    report = {"phase": "failed", "problem": "x"}
    assert guarded.code("bound", "PUT", f"{bodies.RESTORES}/{restore}/ranks/0", json=report) == "forbidden"
    assert guarded.ask("read", "DELETE", f"{bodies.RESTORES}/{restore}").json()["state"] == "cancelled"


def test_a_read_token_ends_only_the_leases_it_took(guarded: Guarded) -> None:
    request = {"id": guarded.other.id, "holder": "restore: somebody", "ttl_s": 600}

    def taken_by(token: str) -> str:
        lease = guarded.ask(token, "POST", bodies.LEASES, json=request).json()
        return f"{bodies.LEASES}/{lease['run']}/{lease['lease']}"

    assert guarded.code("read", "DELETE", taken_by("bootstrap")) == "forbidden"
    assert guarded.code("read", "DELETE", taken_by("read")) == ""
    assert guarded.code("write", "DELETE", taken_by("read")) == "forbidden"  # without scope read
    assert guarded.code("bootstrap", "DELETE", taken_by("read")) == ""


def test_a_read_token_reports_to_and_ends_only_the_restores_it_began(guarded: Guarded) -> None:
    request = {"run": "bert", "key": "job", "world_size": 2, "rank": 0}
    one = f"{bodies.RESTORES}/{guarded.ask('bootstrap', 'POST', bodies.RESTORES, json=request).json()['id']}"
    report = {"phase": "failed", "problem": "it is not mine"}
    assert guarded.code("read", "PUT", f"{one}/ranks/1", json=report) == "forbidden"
    assert guarded.code("read", "POST", bodies.RESTORES, json={**request, "rank": 1}) == "forbidden"
    assert guarded.code("read", "DELETE", one) == "forbidden"
    assert guarded.ask("read", "GET", one).json()["state"] == "restoring"
    own = guarded.ask("read", "POST", bodies.RESTORES, json={**request, "key": "own"}).json()["id"]
    assert guarded.code("read", "DELETE", f"{bodies.RESTORES}/{own}") == ""


def test_jobs_ask_for_what_they_do(guarded: Guarded) -> None:
    for body, scope in (
        ({"kind": "verify"}, Scope.READ),
        ({"kind": "heal"}, Scope.WRITE),
        ({"kind": "gc"}, Scope.PRUNE),
    ):
        for given in (Scope.READ, Scope.ADMIN):
            code = guarded.code(given, "POST", bodies.JOBS, json=body)
            assert (code == "forbidden") is (given not in (scope, Scope.ADMIN)), (body, given)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/checkpoints/..%2Fbert@1", "/v1/checkpoints/g%2F..%2Fbert@1", "/v1/checkpoints/%2e%2e%2fbert@1/manifest",
        "/v1/checkpoints/gpt-a@1/shards/..%2F..%2F..%2Fsecret", "/v1/checkpoints/gpt-a@1/shards/%2Fetc%2Fpasswd",
        "/v1/checkpoints/gpt-a@1/shards/shard-00000.ckpt%00", "/v1/checkpoints/gpt-a@1%0a/manifest",
        "/v1/checkpoints/gpt-a@1/shards/....%2F%2Fmanifest.json.zst", "/v1/checkpoints/.@1", "/v1/checkpoints/..@1",
        "/checkpoints/latest?run=..", "/checkpoints/latest?run=gpt-a/../bert", "/checkpoints/latest?run=%2Fetc",
    ],
)  # fmt: skip
def test_no_path_leaves_its_run(guarded: Guarded, path: str) -> None:
    for token in ("bootstrap", "bound"):
        answer = guarded.ask(token, "GET", path)
        assert answer.status_code in (403, 404, 422), answer.text
        assert answer.headers["content-type"] == bodies.PROBLEM


def test_the_client_raises_the_daemons_error(guarded: Guarded) -> None:
    with guarded.daemon.client() as client, pytest.raises(Unauthorized, match="requires a token"):
        client.latest()
    with guarded.daemon.client("wrong") as client, pytest.raises(Denied, match="unknown, revoked or expired"):
        client.latest()
    with guarded.daemon.client(guarded.secrets["write"]) as client, pytest.raises(Forbidden, match="no scope 'read'"):
        client.latest()


def test_other_sites_may_read_nothing(guarded: Guarded) -> None:
    origin = {"Origin": "https://evil.example"}
    answer = guarded.ask("bootstrap", "GET", bodies.RUNS, headers=origin)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = httpx.options(guarded.daemon.url + bodies.PRUNE, headers={**origin, **asked})
    assert not preflight.is_success
    for told in (answer, preflight):
        assert not [name for name in told.headers if name.startswith("access-control")]
        assert told.headers["x-content-type-options"] == "nosniff"
        assert told.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert told.headers["referrer-policy"] == "no-referrer"


def test_without_tokens_it_answers_only_to_its_own_address(store: Store) -> None:
    with running_daemon(store.url) as daemon:
        port = daemon.url.rpartition(":")[2]
        for host in (f"127.0.0.1:{port}", "localhost", f"[::1]:{port}"):
            assert daemon.get(bodies.RUNS, headers={"Host": host}).status_code == 200, host
        for host in ("evil.example", f"evil.example:{port}", "10.0.0.1", "127.0.0.1.evil.example", ""):
            answer = daemon.get(bodies.RUNS, headers={"Host": host})
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), host
        assert daemon.get("/livez", headers={"Host": "10.0.0.1"}).status_code == 200


def test_without_tokens_pages_of_other_sites_change_nothing(store: Store) -> None:
    with running_daemon(store.url) as daemon:
        own = {"Origin": daemon.url}
        for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site", **own}, {"Origin": "null"}):
            for path in (bodies.REINDEX, bodies.PROBE, bodies.RUNS + "/none/preempt", "/store"):
                answer = httpx.post(daemon.url + path, headers={**headers, "Content-Type": "text/plain"}, timeout=60)
                assert answer.status_code == 403, (path, headers)
        for headers in ({}, own, {"Sec-Fetch-Site": "same-origin", **own}, {"Sec-Fetch-Site": "none"}):
            assert httpx.post(daemon.url + bodies.REINDEX, headers=headers, timeout=60).is_success, headers


def test_failures_are_throttled_and_known_tokens_are_not(store: Store) -> None:
    write_checkpoint(store, step=1)
    with running_daemon(store.url, environment={**os.environ, "CKPTD_TOKEN": _BOOTSTRAP}) as daemon:

        def status(token: str) -> int:
            answer = daemon.get("/checkpoints/latest", headers={"Authorization": f"Bearer {token}"})
            if answer.status_code == 429:
                assert answer.headers["retry-after"] == "60"
            return answer.status_code

        assert status(_BOOTSTRAP) == 200
        assert [status(f"wrong {i}") for i in range(MAX_FAILURES + 2)] == [401] * MAX_FAILURES + [429] * 2
        assert status(_BOOTSTRAP) == 200
        headers = {"Authorization": f"Bearer {_BOOTSTRAP}"}
        wait_until(
            lambda: 'ckptd_auth_failures_total{reason="throttled"} 2.0' in daemon.get("/metrics", headers=headers).text,
            "counting",
        )


def test_the_throttle_forgets_and_stays_small() -> None:
    now = [0.0]
    throttle = Throttle(lambda: now[0])
    for _ in range(MAX_FAILURES):
        throttle.check("a", "x")
        throttle.failed("a")
    with pytest.raises(TooManyFailures):
        throttle.check("a", "right, but never used from here")
    throttle.check("b", "x")
    now[0] += WINDOW_S
    throttle.check("a", "x")
    for i in range(30_000):
        throttle.failed(str(i))
        throttle.succeeded(str(i), "s")
    assert max(len(throttle._failures), len(throttle._trusted)) <= 10_000


def _filled(path: str, run: str, id: str) -> str:
    id = id if path.startswith(bodies.CHECKPOINTS) else _ULID
    attempt = f"000000000001-{_ULID}"
    return path.format(id=id, run=run, attempt=attempt, lease=_ULID, name="shard-00000.ckpt", rank="0")
