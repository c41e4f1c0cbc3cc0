"""The shell function in docs/how-to/orchestrators.md, with a real shell and a real curl."""

from __future__ import annotations

import http.server
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ckptd.conftest import Served
from tests.support.daemons import running_daemon

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def recipe() -> str:
    (found,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/how-to/orchestrators.md").read_text(), re.S)
    return str(found)


def use() -> str:
    """The line that docs/how-to/orchestrators.md recommends."""
    [found] = re.findall(
        r"`(\S*\$\(latest_checkpoint gpt\)[^`]*)` sets", (ROOT / "docs/how-to/orchestrators.md").read_text()
    )
    return str(found)


def shell(line: str, url: str, shell: str = "sh", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "CKPTD_URL": url, "TRIES": "3", "PAUSE": "0.05", **variables}
    return subprocess.run(
        [shell, "-u", "-c", f"{recipe()}\n{line}"], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@contextmanager
def answering(*statuses: int, body: bool = True) -> Iterator[str]:
    """A server that gives these statuses, then the last one for ever. body: errors have the daemon's body."""
    left = list(statuses)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"CKPT_STEP=7\n" if status == 200 else b'{"code":"no_checkpoint"}' if body else b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_the_newest_checkpoint_becomes_variables(served: Served, program: str) -> None:
    done = shell(f'{use()}; echo "$CKPT_STEP of $CKPT_RUN: $CKPT_ID"', served.daemon.url, program)
    assert (done.returncode, done.stdout) == (0, f"30 of gpt: {served.newest.id}\n"), done.stderr


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_a_script_ends_if_there_is_no_answer(program: str) -> None:
    done = shell(f"{use()}; echo goes on", "http://127.0.0.1:1", program, TRIES="1")
    assert (done.returncode, done.stdout) == (7, "")


def test_another_server_that_has_no_such_path_does_not_mean_no_checkpoint() -> None:
    with answering(404, body=False) as url:
        assert shell("latest_checkpoint gpt", url).returncode == 2


def test_no_checkpoint_is_success_without_output(served: Served) -> None:
    done = shell("latest_checkpoint none", served.daemon.url)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_wrong_token_is_2_and_the_right_one_works(served: Served) -> None:
    environment = {**os.environ, "CKPTD_TOKEN": "secret of the test"}
    with running_daemon(served.store.url, environment=environment) as guarded:
        refused = shell("latest_checkpoint gpt", guarded.url, CKPT_TOKEN="wrong")
        assert (refused.returncode, refused.stdout, "unauthorized" in refused.stderr) == (2, "", True)
        assert "CKPT_STEP=30" in shell("latest_checkpoint gpt", guarded.url, CKPT_TOKEN="secret of the test").stdout


@pytest.mark.parametrize(("statuses", "code"), [((503, 429, 200), 0), ((503,), 7), ((429,), 7), ((500, 404), 0)])
def test_what_may_change_is_asked_again(statuses: tuple[int, ...], code: int) -> None:
    with answering(*statuses) as url:
        done = shell("latest_checkpoint gpt", url)
    assert (done.returncode, "CKPT_STEP=7" in done.stdout) == (code, 200 in statuses)


@pytest.mark.parametrize("status", [401, 403, 414, 422])
def test_what_will_not_change_is_not_asked_again(status: int) -> None:
    with answering(status, 200) as url:
        assert shell("latest_checkpoint gpt", url).returncode == 2


def test_no_daemon_is_7() -> None:
    assert shell("latest_checkpoint gpt", "http://127.0.0.1:1", TRIES="1").returncode == 7
