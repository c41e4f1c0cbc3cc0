"""The shell function in docs/how-to/orchestrators.md, with a real shell and a real curl."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.ckptapi.scripted import Answer, Scripted, scripted_daemon
from tests.ckptd.conftest import Served
from tests.support.daemons import running_daemon

PAGE = (Path(__file__).parents[3] / "docs/how-to/orchestrators.md").read_text()
(RECIPE,) = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
(USE,) = re.findall(r"`(\S*\$\(latest_checkpoint gpt\)[^`]*)` sets", PAGE)
"""The function, and the line that the page recommends."""
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def shell(line: str, url: str, shell: str = "sh", **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "CKPTD_URL": url, "TRIES": "3", "PAUSE": "0.05", **variables}
    return subprocess.run(
        [shell, "-u", "-c", f"{RECIPE}\n{line}"], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


def answering(*statuses: int, body: bool = True) -> AbstractContextManager[Scripted]:
    """A server that gives these statuses, then the last one for ever. body: errors have the daemon's body."""
    said = b'{"code":"no_checkpoint"}' if body else b"{}"
    return scripted_daemon([Answer(status, b"CKPT_STEP=7\n" if status == 200 else said) for status in statuses])


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_the_newest_checkpoint_becomes_variables(served: Served, program: str) -> None:
    done = shell(f'{USE}; echo "$CKPT_STEP of $CKPT_RUN: $CKPT_ID"', served.daemon.url, program)
    assert (done.returncode, done.stdout) == (0, f"30 of gpt: {served.newest.id}\n"), done.stderr


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_a_script_ends_if_there_is_no_answer(program: str) -> None:
    done = shell(f"{USE}; echo goes on", "http://127.0.0.1:1", program, TRIES="1")
    assert (done.returncode, done.stdout) == (7, "")


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
    with answering(*statuses) as server:
        done = shell("latest_checkpoint gpt", server.url)
    assert (done.returncode, "CKPT_STEP=7" in done.stdout) == (code, 200 in statuses)


@pytest.mark.parametrize(("status", "body"), [(401, True), (403, True), (414, True), (422, True), (404, False)])
def test_what_will_not_change_is_not_asked_again(status: int, body: bool) -> None:
    """Nor is a server that has no such path: that does not mean that there is no checkpoint."""
    with answering(status, 200, body=body) as server:
        assert shell("latest_checkpoint gpt", server.url).returncode == 2
