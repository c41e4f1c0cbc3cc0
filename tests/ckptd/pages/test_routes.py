from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import unquote

import httpx
import pytest
from fastapi.routing import APIRoute

from ckptapi import bodies
from ckptd.http.access import RULES
from ckptd.pages import routes
from ckptstore.clock import system_clock
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.names import new_ulid
from ckptstore.run import Run
from tests.ckptd.conftest import Served
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

ADMIN = "0123456789abcdef-bootstrap"
HOSTILE = (
    "/runs/..%2f..%2fetc", "/runs/%00", "/runs/*", "/runs/gp%3F", "/runs/" + "x" * 300,
    "/checkpoints/gpt@-1", "/checkpoints/..@1",
    "/checkpoints/gpt@1%2F..%2F..", "/restores/..", "/restores/'", "/jobs/%27--", "/runs/gpt?page=-1",
    "/runs/gpt?page=99999999999999999", "/runs/gpt?state=%3Cscript%3E", "/runs/gpt?min_step=1e9",
    "/runs/gpt?keep=%F0%9F%98%80", "/attempts?run=../x", "/restores?run=%00", "/?page=x",
    "/runs/gpt?metric=" + "m" * 3000,
)  # fmt: skip
PATTERNS = ("/runs/%2A", "/runs/gp%3F", "/runs/g%2A")
OTHER_FILES = ("/static/../ckptd.css", "/static/..%2fckptd.css", "/static/", "/static/settings.py")
ANSWERED = [(HOSTILE, (200, 404, 422)), (PATTERNS, (422,)), (OTHER_FILES, (404,))]


@pytest.fixture(scope="module")
def guarded(served: Served) -> Iterator[Daemon]:
    """A daemon on the same store that asks for tokens."""
    with running_daemon(served.store.url, environment={**os.environ, "CKPTD_TOKEN": ADMIN}) as daemon:
        yield daemon


@pytest.fixture
def visitor(guarded: Daemon) -> Iterator[httpx.Client]:
    """A browser without scripts and without a picture."""
    with httpx.Client(base_url=guarded.url, follow_redirects=True, timeout=60) as client:
        yield client


def _form(page: httpx.Response) -> dict[str, str]:
    """The hidden fields of the last form."""
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', page.text))


def _log_in(client: httpx.Client, token: str = ADMIN, path: str = "/login") -> httpx.Response:
    return client.post("/login", data={**_form(client.get(path)), "token": token})


class _Outline(HTMLParser):
    """Tags in order, and attributes that must not be there."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "input"):
            self.open.append(tag)
        self.wrong += [f"{tag} {name}" for name, _ in attributes if name == "style" or name.startswith("on")]

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.wrong += [f"{tag} {name}" for name, _ in attributes if name == "style" or name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"/{tag}")


@pytest.mark.parametrize(
    "path", ["/", "/runs/gpt?keep=1", "/checkpoints/gpt@30", "/attempts", "/restores", "/jobs", "/store", "/runs/none"]
)
def test_pages_are_well_formed_and_bring_nothing_inline(served: Served, path: str) -> None:
    page = served.daemon.get(path)
    outline = _Outline(page.text)
    assert (outline.open, outline.wrong) == ([], [])
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-store"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_every_page_has_a_rule() -> None:
    found = [route for route in routes.router.routes if isinstance(route, APIRoute)]
    pages = {(method, route.path_format) for route in found for method in route.methods or ()}
    assert (pages - RULES.keys(), len(pages)) == (set(), 13)


def test_pages_are_no_part_of_the_api(served: Served) -> None:
    assert not any(path in served.daemon.get("/openapi.json").json()["paths"] for path in ("/", "/jobs", "/runs/{run}"))
    assert served.daemon.get("/checkpoints/latest?run=gpt").headers["content-type"] == "application/json"


def test_metrics_and_entries_are_shown_as_text(served: Served) -> None:
    write_checkpoint(served.store, "odd", 1, {"model/<b>&amp;'\"": SMALL["model/a"]}, {"<i>x</i>": 1.0})
    wait_until(lambda: served.daemon.get("/runs/odd").status_code == 200, "the commit's way into the index")
    for path in ("/runs/odd", "/checkpoints/odd@1"):
        page = served.daemon.get(path).text
        assert "&lt;i&gt;x&lt;/i&gt;" in page
        assert "<i>" not in page
        assert "<b>" not in page


def test_the_page_of_a_run_shows_its_branches(served: Served) -> None:
    parent = write_checkpoint(served.store, "forked", 300, SMALL)
    write_checkpoint(served.store, "forked", 400, SMALL)
    assert "Generation</th>" not in served.daemon.get("/runs/gpt").text
    session = Session(new_ulid(system_clock()), parent.attempt)
    number = begin_generation(Run(served.store, "forked"), session).number
    write_checkpoint(served.store, "forked", 310, SMALL, generation=number)
    seen = ("Generation</th>", "<td>1, from step 300</td>", "<td>0</td>", "abandoned</")
    wait_until(
        lambda: all(text in served.daemon.get("/runs/forked").text for text in seen), "the branch's way into the index"
    )
    assert "<small>from step 300; live</small>" in served.daemon.get("/checkpoints/forked@310").text
    assert "<small>abandoned</small>" in served.daemon.get("/checkpoints/forked@400").text
    outline = _Outline(served.daemon.get("/runs/forked?keep=1&abandoned=3").text)
    assert (outline.open, outline.wrong) == ([], [])


@pytest.mark.parametrize(("path", "statuses"), [(path, statuses) for paths, statuses in ANSWERED for path in paths])
def test_hostile_requests_get_an_answer_that_is_not_an_accident(
    served: Served, path: str, statuses: tuple[int, ...]
) -> None:
    answer = served.daemon.get(path)
    assert answer.status_code in statuses
    assert "<script>" not in answer.text
    assert "Traceback" not in served.daemon.log()


def test_runs_are_compared_and_the_store_says_what_waits(served: Served) -> None:
    for name, losses, tags in (("left", (4.0, 3.0), {"team": "x", "lr": "1"}), ("right", (5.0,), {"team": "x"})):
        for step, loss in enumerate(losses):
            last = write_checkpoint(served.store, name, step, SMALL, {"loss": loss})
        change_labels(Run(served.store, name), last.attempt, LabelChange(tags))

    def differences() -> str:
        page = served.daemon.get("/runs/left?metric=loss&other=right&smooth=0.5").text
        return page.partition("differences-title")[2].partition("</section>")[0]

    wait_until(lambda: "lr=1" in (found := differences()) and "team" not in found, "the tags' way into the index")
    assert re.findall(r'<td class="number">([.0-9]+)</td>', differences()) == ["3", "3", "4", "5", "5", "5"]
    assert served.daemon.get("/runs/left?smooth=1").status_code == 422
    for trial in range(21):
        write_checkpoint(served.store, f"sweep/{trial:02}", 1, SMALL, {"loss": 1.0})
    beside = "/runs/left?metric=loss&other=sweep/*"
    wait_until(lambda: "2 more of the runs" in served.daemon.get(beside).text, "the sweep's way into the index")
    assert len(set(re.findall(r'data-line="(line-[0-9]+)"', served.daemon.get(beside).text))) == 20
    measured = "0 B of deleted checkpoints, 0 B of unfinished ones; at the last collection"
    wait_until(lambda: measured in served.daemon.get("/store").text, "the first collection")


def test_files_are_fetched_once(served: Served) -> None:
    first = served.daemon.get("/static/ckptd.css")
    assert first.headers["content-type"].startswith("text/css")
    again = served.daemon.get("/static/ckptd.css", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_store_is_probed_for_a_form_of_the_page_only(served: Served) -> None:
    with httpx.Client(base_url=served.daemon.url) as client:
        page = client.get("/store")
        assert client.post("/store", data={"csrf": "0" * 43}).status_code == 403
        assert "passed" in client.post("/store", data=_form(page)).text
    assert served.daemon.post("/store", {"csrf": ""}).status_code == 403


@pytest.mark.parametrize("path", ["/", "/runs/gpt", "/checkpoints/gpt@30", "/attempts", "/restores", "/jobs"])
def test_without_a_login_pages_lead_to_it_and_tell_nothing(guarded: Daemon, path: str) -> None:
    for cookies in ({}, {"ckptd_session": "0" * 43}, {"ckptd_session": ADMIN}):
        answer = guarded.get(path, cookies=cookies)
        assert (answer.status_code, answer.text) == (303, "")
        assert unquote(answer.headers["location"]) == f"/login?next={path}"


def test_a_login_is_worth_what_its_token_is(guarded: Daemon, visitor: httpx.Client) -> None:
    with guarded.client(ADMIN) as admin:
        reader = bodies.TokenRequest(name="reader", scopes=[bodies.Scope.READ])
        secret = admin.create_token(reader).secret
        writer = bodies.TokenRequest(name="writer", scopes=[bodies.Scope.WRITE])
        useless = admin.create_token(writer).secret
        assert _log_in(visitor, secret).url.path == "/"
        page = visitor.get("/store")
        assert "Probe the store now" not in page.text
        assert visitor.post("/store", data=_form(page)).status_code == 403
        admin.revoke_token("reader")
        assert (visitor.get("/").url.path, _log_in(visitor, useless).status_code) == ("/login", 403)


def test_the_api_knows_no_cookie(visitor: httpx.Client) -> None:
    _log_in(visitor)
    assert visitor.get("/").status_code == 200
    for path in (bodies.RUNS, bodies.TOKENS, "/metrics", "/checkpoints/latest"):
        assert visitor.get(path).status_code == 401
    assert visitor.post(bodies.PRUNE, json={"keep_last": 1}).status_code == 401


def test_a_token_in_the_header_opens_pages_too(guarded: Daemon) -> None:
    page = guarded.get("/", headers={"Authorization": f"Bearer {ADMIN}"})
    assert page.status_code == 200
    assert "Log out" not in page.text


@pytest.mark.parametrize(
    "following", ["//evil.example/", "https://evil.example", "/\\evil", "/v1/runs", "javascript:x"]
)
def test_a_login_leads_to_pages_of_ours_only(visitor: httpx.Client, following: str) -> None:
    form = _form(visitor.get("/login", params={"next": following}))
    assert form["next"] == "/"
    answer = visitor.post("/login", data={**form, "next": following, "token": ADMIN}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")


def test_forms_of_other_sites_are_refused(guarded: Daemon, visitor: httpx.Client) -> None:
    assert guarded.post("/login").status_code == 403
    form = _form(visitor.get("/login"))
    assert httpx.post(f"{guarded.url}/login", data={**form, "token": ADMIN}).status_code == 403
    assert visitor.post("/login", data={"token": ADMIN, "csrf": form["csrf"][::-1]}).status_code == 403
    _log_in(visitor)
    assert visitor.post("/logout", data={"csrf": "x"}).status_code == 403
    assert visitor.get("/").url.path == "/"


def test_cookies_are_for_browsers_and_for_this_site_alone(visitor: httpx.Client) -> None:
    page = visitor.get("/login")
    answer = visitor.post("/login", data={**_form(page), "token": ADMIN}, follow_redirects=False)
    for header in (page.headers["set-cookie"], answer.headers["set-cookie"]):
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(header.split("; "))
    assert ADMIN not in answer.headers["set-cookie"]


def test_guessing_is_throttled_and_large_forms_are_refused(visitor: httpx.Client, served: Served) -> None:
    assert visitor.post("/login", content=b"token=" + b"x" * 10_000).status_code == 422
    assert visitor.post("/login", content=b"\xff\xfe").status_code == 422
    assert visitor.post("/login", content="&".join(f"a{i}=" for i in range(100)).encode()).status_code == 422
    with running_daemon(served.store.url, environment={**os.environ, "CKPTD_TOKEN": ADMIN}) as daemon:  # noqa: SIM117
        with httpx.Client(base_url=daemon.url, follow_redirects=True) as guesser:
            answers = [_log_in(guesser, f"guess-{i}-0123456789").status_code for i in range(12)]
            assert answers == [401] * 10 + [429] * 2
            assert 'reason="throttled"' in daemon.get("/metrics", headers={"Authorization": f"Bearer {ADMIN}"}).text
            assert "guess-3" not in daemon.log()
