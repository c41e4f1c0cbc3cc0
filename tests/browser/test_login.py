"""Logging in and out, in a real browser."""

from __future__ import annotations

from collections.abc import Callable

from ckptapi import bodies
from tests.browser.conftest import ADMIN, Dashboard
from tests.browser.webdriver import Browser
from tests.support.waiting import wait_until

_ENTER = "\ue007"


def _log_in(browser: Browser, token: str) -> None:
    browser.type("#token", token)
    browser.follow(".login button")


def test_who_has_a_token_comes_in_and_stays_until_he_leaves(
    browser: Browser, guarded: Dashboard, keep_picture: Callable[[str], None]
) -> None:
    browser.open(f"{guarded.daemon.url}/runs/gpt?metric=size")
    assert browser.path.startswith("/login?next=")
    assert browser.complaints() == []
    keep_picture("login")
    _log_in(browser, "ckptd_nobody_" + "0" * 64)
    assert "unknown, revoked or expired" in browser.text()
    keep_picture("login-refused")
    browser.complaints()
    _log_in(browser, ADMIN)
    assert browser.path == "/runs/gpt?metric=size"
    assert "bootstrap" in browser.text("header")
    keep_picture("logged-in")
    session = browser.cookies()["ckptd_session"]
    assert (session["httpOnly"], session["sameSite"]) == (True, "Strict")
    assert ADMIN not in str(browser.cookies()) + browser.source()
    browser.follow(".who button")
    assert browser.path == "/login"
    assert "ckptd_session" not in browser.cookies()
    browser.open(guarded.daemon.url)
    assert browser.path.startswith("/login")
    assert browser.complaints() == []
    old = guarded.daemon.get("/", cookies={"ckptd_session": session["value"]})
    assert old.headers["location"].startswith("/login")


def test_logging_in_needs_no_script_and_no_mouse(browser: Browser, guarded: Dashboard) -> None:
    browser.scripts(False)
    browser.open(guarded.daemon.url)
    browser.wait_for_focus("#token")
    for character in ADMIN:
        browser.press(character)
    browser.press(_ENTER)
    wait_until(lambda: "Log out" in browser.source(), "the first page")
    assert "gpt" in browser.source()


def test_a_token_for_some_runs_shows_those_and_no_others(browser: Browser, guarded: Dashboard) -> None:
    with guarded.daemon.client(ADMIN) as client:
        request = bodies.TokenRequest(name="vision", scopes=[bodies.Scope.READ], runs=["vi*"])
        secret = client.create_token(request).secret
    browser.open(guarded.daemon.url)
    _log_in(browser, secret)
    assert browser.count("tbody tr") == 1
    assert browser.text("tbody th") == "vit"
    assert "Jobs" not in browser.text("header")
    browser.open(f"{guarded.daemon.url}/attempts")
    assert browser.text("tbody th") == "vit"
    browser.complaints()
    for path in ("/runs/gpt", "/checkpoints/gpt@0", "/jobs", "/store", "/attempts?run=gpt"):
        browser.open(guarded.daemon.url + path)
        assert "forbidden" in browser.text()
    browser.open(f"{guarded.daemon.url}/runs/vit")
    assert "last commit" in browser.text()


def test_a_revoked_token_ends_what_was_begun_with_it(browser: Browser, guarded: Dashboard) -> None:
    with guarded.daemon.client(ADMIN) as client:
        secret = client.create_token(bodies.TokenRequest(name="short", scopes=[bodies.Scope.READ])).secret
        browser.open(guarded.daemon.url)
        _log_in(browser, secret)
        assert "short" in browser.text("header")
        client.revoke_token("short")
        wait_until(lambda: browser.path.startswith("/login"), "the live page's turn to the login")
