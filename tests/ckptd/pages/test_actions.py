"""Forms of the pages: they change what the API can change, for tokens that may, and only as the page showed it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ckptapi import bodies
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.retention.pins import list_pins
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import steps, write
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

ADMIN = "0123456789abcdef-bootstrap"
PAGE = "/checkpoints/gpt@10"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path / "store"))
    write(store, 10, 20, 30)
    return store


@pytest.fixture
def daemon(store: Store) -> Iterator[Daemon]:
    with running_daemon(store.url, environment={**os.environ, "CKPTD_TOKEN": ADMIN}) as running:
        yield running


def browser(daemon: Daemon, token: str = ADMIN) -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=daemon.url, headers=headers, follow_redirects=True, timeout=60)


def submit(client: httpx.Client, page: str, path: str = PAGE, **fields: str) -> httpx.Response:
    """Submit a form with the hidden fields that the page at `page` has."""
    hidden = re.findall(r'name="(csrf|expected)" value="([^"]*)"', client.get(page).text)
    return client.post(path, data={**dict(hidden), **fields})


def test_a_checkpoint_is_labelled_held_deleted_and_brought_back(daemon: Daemon, store: Store) -> None:
    run = Run(store, "gpt")
    with browser(daemon) as client:
        assert "pin:paper" in submit(client, PAGE, action="pin", name="paper").text
        assert "Remove the tag owner" in submit(client, PAGE, action="tag", name="owner=ann").text
        assert [pin.name for pin in list_pins(run)] == ["paper"]
        assert submit(client, PAGE, action="delete", sure="1").status_code == 409
        for wrong in ({"action": "delete"}, {"action": "drop"}, {}):
            assert submit(client, PAGE, **wrong).status_code == 422
        assert "Remove the tag" not in submit(client, PAGE, action="untag", name="owner").text
        assert "pin:paper" not in submit(client, PAGE, action="unpin", name="paper").text
        gone = list_checkpoints(run)[-1]
        after = submit(client, PAGE, action="delete", sure="1", reason="a test")
        assert (after.url.path, gone.id in after.text, steps(store, "gpt")) == ("/runs/gpt", True, [30, 20])
        back = submit(client, "/runs/gpt", f"/checkpoints/{gone.id}", action="undelete")
        assert (back.url.path, steps(store, "gpt")) == (f"/checkpoints/{gone.id}", [30, 20, 10])
        assert "Delete them" not in client.get("/runs/gpt?keep=9").text


def test_a_prune_deletes_what_its_preview_showed_or_nothing(daemon: Daemon, store: Store) -> None:
    with browser(daemon) as client:
        shown = client.get("/runs/gpt?keep=1").text
        fields = dict(re.findall(r'name="(csrf|expected)" value="([^"]*)"', shown))
        write(store, 40)
        refused = client.post("/runs/gpt?keep=1", data={**fields, "sure": "1"})
        assert (refused.status_code, steps(store, "gpt")) == (409, [40, 30, 20, 10])
        wait_until(lambda: ">40</a>" in client.get("/runs/gpt").text, "the commit's way into the index")
        done = submit(client, "/runs/gpt?keep=1", "/runs/gpt?keep=1", sure="1")
        assert (done.url.path, steps(store, "gpt")) == ("/runs/gpt", [40])


@pytest.mark.parametrize(
    ("scopes", "may"), [("read", ()), ("read write", ("tag",)), ("read prune", ("pin", "delete", "undelete"))]
)
def test_a_form_needs_the_scope_of_its_action(daemon: Daemon, store: Store, scopes: str, may: tuple[str, ...]) -> None:
    with daemon.client(ADMIN) as admin:
        wanted = [bodies.Scope(scope) for scope in scopes.split()]
        token = admin.create_token(bodies.TokenRequest(name="some", scopes=wanted)).secret
    with browser(daemon, token) as client:
        shown = client.get(PAGE).text
        for action in ("tag", "pin", "delete", "undelete"):
            assert (f'value="{action}"' in shown) == (action in may and action != "undelete"), action
            csrf = re.findall(r'name="csrf" value="([^"]*)"', client.get("/login").text)[0]
            done = client.post(PAGE, data={"csrf": csrf, "action": action, "name": "x"})
            assert (done.status_code == 403) == (action not in may), (action, done.text)
        assert (client.post("/runs/gpt?keep=1").status_code == 403, steps(store, "gpt")) == (True, [30, 20, 10])


def test_a_form_of_another_site_changes_nothing(daemon: Daemon, store: Store) -> None:
    with browser(daemon) as client:
        for path in (PAGE, "/runs/gpt?keep=1"):
            client.get(path)
            assert client.post(path, data={"csrf": "0" * 43, "action": "delete", "sure": "1"}).status_code == 403
    assert steps(store, "gpt") == [30, 20, 10]
