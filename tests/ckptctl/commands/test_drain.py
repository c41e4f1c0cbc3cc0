from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt.saver.presence import parent_of, savers
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.saver.test_launcher import ROOT, TRAINER, Printing, environment, wait_for_line
from tests.support.command_line import Finished, run
from tests.support.waiting import wait_until


@pytest.fixture
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Printing]:
    """A trainer that has handed over two saves of 4 MB; the parameter is the speed of the disk."""
    command = [*TRAINER, str(tmp_path / "store"), "4", "2"]
    with (
        (tmp_path / "stderr").open("w") as stderr,
        Printing(
            command, cwd=ROOT, env=environment(tmp_path, request.param), stderr=stderr, start_new_session=True
        ) as process,
    ):
        wait_for_line(process, "accepted", "2")
        yield process
        process.kill()


def drain(tmp_path: Path, *arguments: str) -> Finished:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return run("drain", "-o", "json", *arguments, env={"TMPDIR": str(tmp_path / "tmp")})


@pytest.mark.parametrize("trainer", [4e6], indirect=True)
@pytest.mark.parametrize("killed", [False, True])
def test_it_returns_when_all_that_was_accepted_is_durable(trainer: Printing, killed: bool, tmp_path: Path) -> None:
    if killed:
        trainer.kill()
    done = drain(tmp_path, "--timeout", "90")
    assert (done.code, done.json["durable"]) == (0, True), done.stderr
    assert [found.step for found in StoreSource(open_store(str(tmp_path / "store"))).checkpoints("r")] == [2, 1]


@pytest.mark.parametrize("trainer", [1e5], indirect=True)
def test_too_little_time_and_another_run(trainer: Printing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    wait_until(lambda: [state.uploading for state in savers() if state.run] == [2], "the saver's note")
    partly = drain(tmp_path, "--timeout", "0.1")
    assert partly.code == 3
    assert partly.stderr.startswith("run r rank 0: "), "progress is shown"
    body = partly.json
    assert (body["durable"], body["savers"], body["left"][0]["run"]) == (False, 1, "r")
    assert body["left"][0]["uploading"] == 2
    assert "not done after 0.1 s" in partly.stderr
    other = drain(tmp_path, "--timeout", "0", "other")
    assert (other.code, other.json["savers"]) == (0, 0)
    # A saver that was killed leaves a note, which counts for nothing and is removed.
    (saver,) = [state for state in savers() if state.store == (tmp_path / "store").as_uri()]
    os.kill(saver.pid, signal.SIGKILL)
    wait_until(lambda: not [state for state in savers() if state.pid == saver.pid])
    assert not list((tmp_path / "tmp").rglob("*.note"))


@pytest.mark.parametrize("trainer", [1e5], indirect=True)
def test_savers_elsewhere_are_left_out(trainer: Printing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (saver,) = [found.name for found in Path("/proc").glob("[0-9]*") if _is_child_saver(found, trainer.pid)]
    assert saver not in {str(state.pid) for state in savers()}
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    assert saver in {str(state.pid) for state in savers()}


def _is_child_saver(process: Path, parent: int) -> bool:
    return parent_of(int(process.name)) == parent and b"ckpt.saver.process" in (process / "cmdline").read_bytes()


def test_no_saver_is_no_error(tmp_path: Path) -> None:
    done = drain(tmp_path, "nothing-of-this-name")
    assert (done.code, done.json) == (
        0, {"durable": True, "seconds": done.json["seconds"], "savers": 0, "left": []},
    )  # fmt: skip
