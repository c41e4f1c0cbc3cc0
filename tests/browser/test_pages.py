"""What the pages look like in a real browser: complete, quiet, narrow and wide, light and dark, by keyboard, live."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from ckptapi import bodies
from ckptstore.names import Attempt, new_ulid
from tests.browser import dashboard
from tests.browser.conftest import ADMIN, Dashboard
from tests.browser.dashboard import LONG, SCRIPT, SMALL
from tests.browser.webdriver import POINT_AT, Browser
from tests.support.checkpoints import write_rank
from tests.support.waiting import wait_until

_TAB, _ENTER, _ESCAPE = "\ue004", "\ue007", "\ue00c"
_LEFT, _RIGHT = "\ue012", "\ue014"
PAGES = {
    "overview": ("/", "60"),
    "run": ("/runs/gpt", "last-1"),
    "branches": ("/runs/sim", "Branches"),
    "overlay": ("/runs/gpt?metric=loss&also=val_loss&other=fsdp&log=1&smooth=0.8", "loss of fsdp"),
    "sizes": ("/runs/gpt?metric=size", "size by step"),
    "preview": ("/runs/gpt?keep=5&metric=val_loss&page=2", "would remove 54 checkpoints"),
    "goodput": ("/goodput/sim", "lost"),
    "long": (f"/runs/{LONG}?min_step=999999", "No checkpoint of this run matches the filter"),
    "checkpoint": ("/checkpoints/fsdp@9000", "48 ranks of 48 wrote 49 shards"),
    "not-finite": ("/runs/unstable", "ckptctl why unstable"),
    "attempts": ("/attempts", "ranks 1, 3"),
    "restores": ("/restores", "node-07"),
    "restore": ("/restores/{restore}", "vit on node-07"),
    "jobs": ("/jobs", "verify"),
    "job": ("/jobs/{job}", "ok"),
    "store": ("/store", "file://"),
    "problem": ("/runs/absent", "no_checkpoint"),
}


@pytest.fixture(scope="module")
def ids(open_to_all: Dashboard) -> dict[str, str]:
    """Of a restore session under way, and of a job that has ended."""
    daemon = open_to_all.daemon
    with daemon.client() as client:
        restore = dashboard.begin_restore(client, "vit", "seen", [1.0, 0.7, 0.1, 0.8, 0.9, None])
    job = daemon.post("/v1/jobs", {"kind": "verify", "run": "vit"}).json()["id"]
    wait_until(lambda: daemon.get(f"/v1/jobs/{job}").json()["state"] == "succeeded", "the job's end")
    return {"restore": restore, "job": job}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_quiet_and_fits(
    browser: Browser, open_to_all: Dashboard, ids: dict[str, str], keep_picture: Callable[[str], None], name: str
) -> None:
    path, expected = PAGES[name]
    browser.open(open_to_all.daemon.url + path.format(**ids))
    assert expected in browser.text()
    for width, scheme in ((1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")):
        browser.look(width, scheme)
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(_CHARTS) == []
        assert _is_dark(browser) == (scheme == "dark")
        keep_picture(f"{name}-{width}-{scheme}")
    errors = [message for message in browser.complaints() if "status of 404" not in message or name != "problem"]
    assert errors == []


def test_no_colour_of_text_is_too_close_to_what_lies_behind_it(browser: Browser, open_to_all: Dashboard) -> None:
    for scheme in ("light", "dark"):
        browser.look(1280, scheme)
        for path in ("/runs/gpt?keep=5", "/goodput/sim"):
            browser.open(open_to_all.daemon.url + path)
            assert browser.count("main *") > 100
            assert browser.run(_CONTRAST, 4.5) == []


def test_names_are_text_and_never_markup(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/runs/gpt")
    assert SCRIPT in browser.text(".chips")
    assert browser.count("script:not([src])") == 0
    browser.open(f"{open_to_all.daemon.url}/checkpoints/fsdp@9000")
    assert "<img src=x" in browser.text("section[aria-labelledby=entries-title]")
    assert (browser.count("img"), browser.complaints()) == (0, [])


def test_the_content_policy_stops_what_is_not_ours(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(open_to_all.daemon.url)
    browser.run("""
        const inline = document.createElement("script");
        inline.textContent = "window.inline = true";
        document.body.append(inline);
        document.body.setAttribute("style", "opacity: 0.5");
    """)
    assert browser.run("return window.inline ?? false") is False
    assert browser.run("return getComputedStyle(document.body).opacity") == "1"
    assert len([message for message in browser.complaints() if "Content Security Policy" in message]) == 2


def test_charts_have_titles_and_follow_the_choice_of_a_metric(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/runs/gpt")
    assert browser.text("#chart-title") == "loss by step"
    browser.follow(".chips a[href*='also=val_loss']")
    assert browser.text("#chart-title") == "loss, val_loss by step"
    browser.follow(".chips a[href^='?metric=val_loss']")
    assert browser.text("#chart-title") == "val_loss by step"
    assert browser.count("#chart-title ~ .plot circle") == dashboard.NUM_STEPS


def test_a_cross_hair_marks_one_checkpoint_in_all_plots(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/runs/gpt?metric=loss&also=val_loss")
    assert browser.count(".plot") == 3
    browser.run("document.querySelector('.plot [tabindex]').focus()")
    for key in (_LEFT, _LEFT, _LEFT, _RIGHT):
        browser.press(key)
    first, stored, saves = browser.run("return [...document.querySelectorAll('.readout')].map((one) => one.innerText)")
    assert re.fullmatch(r"step 29,000\s+loss 0\.\d+ \(committed\)\s+val_loss 0\.\d+ \(committed\)", first)
    assert re.fullmatch(r"step 29,000\s+[0-9.]+ KiB \(committed\)", stored)
    assert saves.startswith("step 29,000")
    assert (browser.count(".cross"), browser.count(".mark.picked")) == (3, 4)
    browser.run(POINT_AT, 0.0)
    assert browser.text(".readout").startswith("step 0\n")
    browser.press(_ESCAPE)
    assert browser.count(".readout:not([hidden])") == 0
    browser.run(POINT_AT, 1.0)
    browser.press(_ENTER)
    wait_until(lambda: browser.path.startswith("/checkpoints/gpt%4029500"), "the page of the checkpoint")
    assert browser.complaints() == []


def test_pages_work_by_keyboard(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(open_to_all.daemon.url)
    seen: list[str] = []
    while "fsdp" not in seen:
        assert len(seen) < 20
        browser.press(_TAB)
        seen.append(browser.focused().strip())
        assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert seen[:8] == ["Skip to content", "ckptd", "Runs", "Uploads", "Restores", "Jobs", "Store", "Dark"]
    browser.press(_ENTER)
    wait_until(lambda: browser.path == "/runs/fsdp", "the page of the run")


def test_light_or_dark_is_a_choice_that_lasts(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(open_to_all.daemon.url)
    for wanted, offered in ((True, "Light"), (False, "Dark"), (True, "Light")):
        browser.run("document.getElementById('theme').click()")
        assert (_is_dark(browser), browser.text("#theme")) == (wanted, offered)
    browser.open(f"{open_to_all.daemon.url}/runs/gpt")
    assert _is_dark(browser)
    browser.run("localStorage.clear()")
    browser.open(open_to_all.daemon.url)
    assert not _is_dark(browser)
    assert browser.complaints() == []


def test_snippets_are_copied(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/checkpoints/gpt@500")
    browser.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    id = browser.text("#id")
    for name, expected in (("id", id), ("use-python", f'checkpoint="{id}"'), ("use-curl", f"/v1/checkpoints/{id}")):
        browser.run(f"document.querySelector('[data-copy={name}]').click()")
        assert expected in browser.run("return window.copied")
    assert open_to_all.daemon.get(browser.text("#use-curl").partition(open_to_all.daemon.url)[2]).json()["id"] == id
    browser.follow("a[rel=next]")
    assert "Step 1,000" in browser.text("h1")
    browser.follow("a[rel=prev]")
    assert "Step 500" in browser.text("h1")


def test_runs_are_found_and_a_blocked_policy_is_shown(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(open_to_all.daemon.url)
    for key in ("/", "u", "n", "s", _ENTER):
        browser.press(key)
    wait_until(lambda: browser.count("tbody tr") == 1, "the runs that match")
    browser.open(f"{open_to_all.daemon.url}/runs/gpt")
    assert "ada@node-07 · slurm 48213" in browser.text(".origin")
    assert "The policy is blocked, and deletes nothing: the prune would delete" in browser.text()
    assert "nothing: it goes" not in browser.text()
    browser.follow("a[href*='plan=1']")
    assert "The policy would remove 54 checkpoints" in browser.text()
    assert browser.count("tr.removed") == 44, "of the 50 rows of the first page"


def test_a_restore_is_shown_live(browser: Browser, open_to_all: Dashboard) -> None:
    with open_to_all.daemon.client() as client:
        id = dashboard.begin_restore(client, "vit", "watched", [0.5, 0.5])
        browser.open(f"{open_to_all.daemon.url}/restores/{id}")
        assert browser.text(".headline strong") == "50%"
        browser.run("window.sameDocument = true")
        dashboard.report(client, id, 0, 1.0)
        wait_until(lambda: browser.text(".headline strong") == "75%", "the first rank's progress")
        assert browser.count(".cell.restored") == 1
        dashboard.report(client, id, 1, 1.0)
        wait_until(lambda: browser.text(".headline .state") == "restored", "the end")
    assert browser.run("return window.sameDocument") is True
    assert (browser.count("[data-part][data-ended]"), browser.complaints()) == (1, [])


def test_an_upload_appears_and_goes_on_while_one_looks(browser: Browser, open_to_all: Dashboard) -> None:
    store, attempt = open_to_all.store, Attempt(77, new_ulid(0))
    browser.open(f"{open_to_all.daemon.url}/attempts?run=gpt")
    assert "There are no uploads in progress" in browser.text()
    write_rank(store, "gpt", attempt, SMALL, 0, 3)
    wait_until(lambda: "1 of 3" in browser.text(), "the upload")
    write_rank(store, "gpt", attempt, SMALL, 1, 3)
    wait_until(lambda: "2 of 3" in browser.text(), "its second rank")


def test_pages_without_scripts_are_as_complete(browser: Browser, open_to_all: Dashboard, ids: dict[str, str]) -> None:
    browser.scripts(False)
    browser.open(f"{open_to_all.daemon.url}/restores/{ids['restore']}")
    source = browser.source()
    assert "behind" in source
    assert '<meta http-equiv="refresh"' in source.partition("<noscript>")[2].partition("</noscript>")[0]


def test_the_store_has_costs_at_a_price_that_the_browser_keeps(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/store")
    assert "Cost" not in browser.text()
    browser.type("#cost input", "2000000")
    browser.open(f"{open_to_all.daemon.url}/store")
    numbers = browser.run(
        "return [...document.querySelectorAll('[data-bytes]')].map(one => [one.dataset.bytes, one.innerText])"
    )
    assert len(numbers) == browser.count("table tbody tr") + 1
    assert [float(cost.replace(",", "")) for _, cost in numbers] == [
        pytest.approx(float(size) / 500, rel=0.01) for size, _ in numbers
    ]
    browser.run("localStorage.clear()")


def test_a_probe_of_the_store_is_asked_for_by_a_button(browser: Browser, open_to_all: Dashboard) -> None:
    browser.open(f"{open_to_all.daemon.url}/store")
    assert browser.count(".headline") == 0
    browser.follow("main button")
    assert "passed" in browser.text(".headline")
    assert browser.count("table:last-of-type tbody tr") > 2
    assert browser.complaints() == []


def _is_dark(browser: Browser) -> bool:
    colour = browser.run("return getComputedStyle(document.body).backgroundColor")
    return sum(map(int, re.findall(r"\d+", colour)[:3])) < 3 * 128


_CONTRAST = """
function channels(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(colour) {
  const [r, g, b] = colour.slice(0, 3).map((c) => {
    const part = c / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(element) {
  for (let at = element; at !== null; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] === 1) { return colour; }
  }
  return [255, 255, 255];
}
const poor = [];
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || element.closest("svg, noscript, option")) { continue; }
  const [a, b] = [light(channels(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < arguments[0]) { poor.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`); }
}
return poor;
"""


_CHARTS = """
const wrong = [];
for (const chart of document.querySelectorAll(".chart")) {
  const box = chart.closest(".scroll"), edges = box.getBoundingClientRect();
  if (box.scrollWidth > box.clientWidth || edges.right > innerWidth) { wrong.push(`${box.ariaLabel} is cut`); }
  const labels = [...chart.querySelectorAll("text")].map((text) => ({ text, is: text.getBoundingClientRect() }))
    .filter((label) => label.is.width > 0);
  labels.forEach(({ text, is }, i) => {
    const name = `${text.textContent} in ${box.ariaLabel}`;
    const outside = is.left < edges.left || is.right > edges.right;
    if (outside || is.top < edges.top || is.bottom > edges.bottom) { wrong.push(`${name} is cut`); }
    if (is.height < 9) { wrong.push(`${name} is too small`); }
    for (const other of labels.slice(i + 1)) {
      const beside = is.right <= other.is.left || other.is.right <= is.left;
      if (!beside && is.bottom > other.is.top + 2 && other.is.bottom > is.top + 2) {
        wrong.push(`${name} is on ${other.text.textContent}`);
      }
    }
  });
}
return wrong;
"""


def _log_in(browser: Browser, token: str) -> None:
    browser.type("#token", token)
    browser.follow(".login button")


def test_a_token_logs_in_and_out(browser: Browser, guarded: Dashboard, keep_picture: Callable[[str], None]) -> None:
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
    assert (browser.count("tbody tr"), browser.text("tbody th")) == (1, "vit")
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
