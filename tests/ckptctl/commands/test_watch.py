"""watch: every event once, through a stream that breaks, and on a store."""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ckptstore.clock import system_clock
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import sample_arrays, write_checkpoint
from tests.support.command_line import PROGRAM, clean_environment, invoke
from tests.support.daemons import running_daemon
from tests.support.ports import free_port

SMALL = {"model/scalar": sample_arrays()["model/scalar"]}


@contextmanager
def watching(*args: object) -> Iterator[IO[str]]:
    """The lines of a watch as they come; it is ended at the end."""
    command = [*PROGRAM, "watch", *map(str, args)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


def first(lines: IO[str]) -> dict[str, Any]:
    """The next event."""
    found: dict[str, Any] = json.loads(lines.readline())
    return found


def test_commits_are_followed_across_a_restart_of_the_daemon(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    db = f"sqlite:///{tmp_path}/index.db"
    port = ("--port", str(free_port()))
    with (
        running_daemon(store.url, db, options=port) as daemon,
        watching("gpt", "--url", daemon.url, "-o", "jsonl") as lines,
    ):
        # Until the stream is open nothing says so: commit until one is seen.
        steps = iter(range(1000))
        seen = _until_seen(store, steps, lines)
        daemon.stop()
        missed = write_checkpoint(store, "gpt", next(steps), SMALL)
        with running_daemon(store.url, db, options=port):
            told = [first(lines)]
            while told[-1]["checkpoint"] != missed.id:
                told.append(first(lines))
            ids = [event["checkpoint"] for event in [*seen, *told]]
            assert len(set(ids)) == len(ids)
            assert {event["kind"] for event in told} == {"committed"}


def _until_seen(store: Store, steps: Iterator[int], lines: IO[str]) -> list[dict[str, Any]]:
    while True:
        write_checkpoint(store, "gpt", next(steps), SMALL)
        if select.select([lines], [], [], 0.5)[0]:
            return [first(lines)]


def test_a_store_is_looked_at(folder: Path, filled: Store) -> None:
    with watching("--store", folder, "-o", "jsonl", "--count", "2") as lines:
        seen = _until_seen(filled, iter(range(100, 1000)), lines)
        assert (seen[0]["kind"], seen[0]["run"]) == ("committed", "gpt")
        assert first(lines)["kind"] == "committed"
    with watching("gpt", "--store", folder) as texts:
        steps = iter(range(5000, 6000))
        while not select.select([texts], [], [], 0.5)[0]:
            written = write_checkpoint(filled, "gpt", next(steps), SMALL)
        assert "  committed  gpt@5" in texts.readline()
        delete_checkpoint(filled, written, "test", system_clock)
        while "  deleted  gpt@5" not in texts.readline():
            pass


def test_what_cannot_be_watched(folder: Path) -> None:
    assert invoke("watch", "../x", "--store", folder).code == 2
    done = invoke("watch", "--url", "http://127.0.0.1:9", "-o", "json")
    assert (done.code, done.error["code"]) == (7, "daemon_unavailable")
