from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ckptstore.commits.catalog import Checkpoint
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.command_line import invoke, started
from tests.support.daemons import running_daemon
from tests.support.ports import free_port
from tests.support.waiting import Lines


def event(lines: Lines) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lines.next())
    return found


def commit_until_printed(store: Store, steps: Iterator[int], lines: Lines) -> Checkpoint:
    """Nothing says when the watch has begun: commit until it prints something; the newest checkpoint."""
    for step in itertools.islice(steps, 120):
        written = write_checkpoint(store, "gpt", step, SMALL)
        if lines.come_within(0.5):
            return written
    raise AssertionError("no commit was printed")


def test_commits_are_followed_across_a_restart_of_the_daemon(tmp_path: Path) -> None:
    store, db = open_store(str(tmp_path / "store")), f"sqlite:///{tmp_path}/index.db"
    port = ("--port", str(free_port()))
    steps = itertools.count()
    with (
        running_daemon(store.url, db, options=port) as daemon,
        started("watch", "gpt", "--url", daemon.url, "-o", "jsonl") as (_, lines),
    ):
        commit_until_printed(store, steps, lines)
        daemon.stop()
        missed = write_checkpoint(store, "gpt", next(steps), SMALL)
        with running_daemon(store.url, db, options=port):
            events = [event(lines)]
            while events[-1]["checkpoint"] != missed.id:
                events.append(event(lines))
    ids = [event["checkpoint"] for event in events]
    assert (len(set(ids)), {event["kind"] for event in events}) == (len(ids), {"committed"})


def test_a_store_is_polled(folder: Path, filled: Store) -> None:
    with started("watch", "--store", folder, "-o", "jsonl", "--count", "2") as (_, lines):
        steps = itertools.count(100)
        commit_until_printed(filled, steps, lines)
        first = event(lines)
        assert (first["kind"], first["run"]) == ("committed", "gpt")
        if not lines.come_within(0.5):
            write_checkpoint(filled, "gpt", next(steps), SMALL)
        assert event(lines)["kind"] == "committed"
        assert lines.next() == "", "two were asked for"


def test_a_deletion_in_a_store_is_printed(folder: Path, filled: Store) -> None:
    with started("watch", "gpt", "--store", folder) as (_, lines):
        newest = commit_until_printed(filled, itertools.count(5000), lines)
        # A checkpoint that is committed and deleted between two polls is never seen: wait until this one is.
        while f"  committed  {newest.id}" not in (line := lines.next()):
            assert "  committed  gpt@5" in line
        delete_checkpoint(Run(filled, newest.run), newest.attempt, "test", force=True)
        assert f"  deleted  {newest.id}" in lines.next()


def test_a_daemon_that_is_away_cannot_be_watched() -> None:
    done = invoke("watch", "--url", "http://127.0.0.1:9", "-o", "json")
    assert (done.code, done.error["code"]) == (7, "daemon_unavailable")
