"""A real browser without a window: Chromium, driven over the WebDriver protocol, which is JSON over HTTP."""

from __future__ import annotations

import base64
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import wait_until

PROGRAMS = ("chromium", "chromedriver")
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
POINT_AT = """
const svg = document.querySelector(".plot svg"), edges = svg.getBoundingClientRect();
svg.dispatchEvent(new PointerEvent("pointermove", { clientX: edges.left + arguments[0] * edges.width }));
"""
"""Points at a part of the width of the first plot."""
_STARTED = "started successfully on port "


def missing() -> list[str]:
    """Programs that these tests need and this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


class Browser:
    def __init__(self, url: str, id: str) -> None:
        self._session = f"{url}/session/{id}"
        self._client = httpx.Client(base_url=self._session, timeout=60)

    def open(self, url: str) -> None:
        """Load a page, and wait until it is there."""
        self._post("/url", url=url)

    def run(self, script: str, *arguments: object) -> Any:
        return self._post("/execute/sync", script=script, args=list(arguments))

    def text(self, selector: str = "main") -> str:
        """What people read in the first element that matches; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def follow(self, selector: str) -> None:
        """Click the first element that matches, and wait until the page is there that it leads to."""
        self.run("window.left = false")
        # Pages scroll smoothly, and a click does not wait for that.
        self.run("document.querySelector(arguments[0]).scrollIntoView({ behavior: 'instant' })", selector)
        self._post(f"/element/{self._find(selector)}/click")
        arrived = "return window.left === undefined && document.readyState === 'complete'"
        wait_until(lambda: self.run(arrived), f"the page behind {selector}")

    def type(self, selector: str, text: str) -> None:
        self._post(f"/element/{self._find(selector)}/value", text=text)

    def press(self, key: str) -> None:
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def wait_for_focus(self, selector: str) -> None:
        """Return when the first element that matches has the focus; a page may give it after it has loaded."""
        wanted = self._find(selector)
        wait_until(lambda: self._get("/element/active")[_ELEMENT] == wanted, f"the focus of {selector}")

    def focused(self) -> str:
        """The text of the element that has the focus."""
        return str(self.run("return document.activeElement.innerText"))

    @property
    def path(self) -> str:
        """Of the page that is shown, with its query."""
        return str(self.run("return location.pathname + location.search"))

    def cookies(self) -> dict[str, dict[str, Any]]:
        """All cookies of the page, those included that scripts do not see."""
        return {cookie["name"]: cookie for cookie in self._get("/cookie")}

    def forget(self) -> None:
        """Delete all cookies, and what the console said."""
        self._client.delete("/cookie").raise_for_status()
        self.complaints()

    def complaints(self) -> list[str]:
        """What the console said since the last call: errors, warnings, violations of the content policy."""
        return [entry["message"] for entry in self._post("/se/log", type="browser")]

    def look(self, width: int = 1280, scheme: str = "light", height: int = 900) -> None:
        """Be so wide, and prefer light or dark."""
        self._resize(width, min(3000, height))
        self._command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def scripts(self, allowed: bool) -> None:
        """Whether pages may run scripts, from the next one on."""
        self._command("Emulation.setScriptExecutionDisabled", value=not allowed)

    def source(self) -> str:
        """The page as markup; works without scripts."""
        return str(self._get("/source"))

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write the page to a PNG file: all of it, up to 3000 pixels of height, or what is in the window."""
        if whole:
            width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
            self._resize(width, min(3000, height))
        path.write_bytes(base64.b64decode(self._get("/screenshot")))

    def close(self) -> None:
        """Close the window; the browser is gone on return."""
        self._client.close()
        httpx.delete(self._session, timeout=60).raise_for_status()

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **size)

    def _find(self, selector: str) -> str:
        return str(self._post("/element", using="css selector", value=selector)[_ELEMENT])

    def _command(self, name: str, **parameters: object) -> None:
        self._post("/goog/cdp/execute", cmd=name, params=parameters)

    def _get(self, path: str) -> Any:
        return _value(self._client.get(path))

    def _post(self, path: str, **body: object) -> Any:
        return _value(self._client.post(path, json=body))


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser with a fresh profile, gone when the block ends."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=output, stderr=output)
        try:
            wait_until(lambda: _STARTED in log.read_text(), "the start of chromedriver")
            port = log.read_text().partition(_STARTED)[2].split(".")[0]
            url = f"http://127.0.0.1:{port}"
            options = {"args": [*_ARGUMENTS, f"--user-data-dir={folder}/profile"]}
            wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            answer = httpx.post(f"{url}/session", json={"capabilities": {"alwaysMatch": wanted}}, timeout=60)
            browser = Browser(url, _value(answer)["sessionId"])
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(30)


def _value(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["value"]
