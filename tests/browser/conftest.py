"""A daemon with something to look at, and one Chromium for all tests here; without Chromium they are skipped, visibly.

`make test` installs Chromium where it may (as root, with apt). CKPTD_SCREENSHOTS=folder keeps what the browser saw.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptstore.stores import Store, open_store
from tests.browser import dashboard
from tests.browser import webdriver as browsers
from tests.browser.dashboard import Shown
from tests.browser.webdriver import Browser
from tests.support.daemons import Daemon, running_daemon

# The daemon must not commit or collect what is to be seen as a live upload.
_PATIENT = ("--commit-grace-seconds", "100000")
ADMIN = "0123456789abcdef-bootstrap"


@dataclass(frozen=True, slots=True)
class Dashboard:
    daemon: Daemon
    store: Store
    shown: Shown


@pytest.fixture(scope="package")
def running_browser() -> Iterator[Browser]:
    if absent := browsers.missing():
        pytest.skip(f"needs {' and '.join(absent)}: apt-get install chromium chromium-driver")
    with browsers.running_browser() as browser:
        yield browser


@pytest.fixture
def browser(running_browser: Browser) -> Browser:
    """A window that has no session, at its usual size."""
    running_browser.look()
    running_browser.scripts(True)
    running_browser.forget()
    return running_browser


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Shown]:
    store = open_store(str(tmp_path_factory.mktemp("dashboard") / "store"))
    return store, dashboard.fill(store)


@pytest.fixture(scope="package")
def open_to_all(running_browser: Browser, filled: tuple[Store, Shown]) -> Iterator[Dashboard]:
    with running_daemon(filled[0].url, options=_PATIENT) as daemon:
        yield Dashboard(daemon, *filled)


@pytest.fixture(scope="package")
def guarded(running_browser: Browser, filled: tuple[Store, Shown]) -> Iterator[Dashboard]:
    environment = {**os.environ, "CKPTD_TOKEN": ADMIN}
    with running_daemon(filled[0].url, options=_PATIENT, environment=environment) as daemon:
        yield Dashboard(daemon, *filled)


@pytest.fixture
def keep_picture(browser: Browser) -> Callable[[str], None]:
    """Keeps what the browser shows, under a name, for inspection."""
    folder = os.environ.get("CKPTD_SCREENSHOTS")

    def keep(name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            browser.picture(Path(folder) / f"{name}.png")

    return keep
