from __future__ import annotations

import json
from collections.abc import Iterator
from uuid import uuid4

import pytest

from ckptapi.bodies import Phase
from ckptapi.client import DaemonClient
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, write_checkpoint
from tests.support.command_line import Terminal, invoke, started
from tests.support.daemons import Daemon, join, running_daemon


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of all tests here, each with a run of its own."""
    return open_store(str(tmp_path_factory.mktemp("restores") / "store"))


@pytest.fixture(scope="module")
def daemon(store: Store) -> Iterator[Daemon]:
    write_checkpoint(store, "other", 5, SMALL)
    with running_daemon(store.url) as running:
        yield running


@pytest.fixture
def run(store: Store) -> str:
    """A run with a checkpoint at step 40."""
    return write_checkpoint(store, f"run-{uuid4().hex[:8]}", 40, SMALL).run


@pytest.fixture
def client(daemon: Daemon) -> Iterator[DaemonClient]:
    with daemon.client() as client:
        yield client


@pytest.fixture
def job(client: DaemonClient, run: str) -> str:
    """A restore by four ranks: one is done, one behind, one is yet to join."""
    id = join(client, run, "job-7", 4, 0, ttl_s=3600, host="node-7").id
    client.report_restore(id, 0, Phase.RESTORED, 2048, 2048)
    client.report_restore(id, 1, Phase.FETCHING, 205, 2048)
    client.report_restore(id, 2, Phase.FETCHING, 1638, 2048)
    return id


def test_a_list_shows_how_far_they_are(daemon: Daemon, client: DaemonClient, job: str, run: str) -> None:
    failed = join(client, run, "job-8", 2, 0).id
    client.report_restore(failed, 0, Phase.FAILED, problem="no space left\n\x1b[2J")
    lines = invoke("restores", run, "--url", daemon.url).stdout.splitlines()
    columns = ["RESTORE", "CHECKPOINT", "STATE", "RANKS", "DONE", "AGE", "HOST", "SLOWEST,", "OR", "PROBLEM"]
    assert (lines[0].split(), lines[1].split()[:4]) == (columns, [failed, f"{run}@40", "failed", "0/2"])
    assert lines[1].endswith(r"rank 0 failed: no space left\n\x1b[2J")
    assert lines[2].split()[:5] == [job, f"{run}@40", "restoring", "1/4", "47%"]
    assert " node-7 " in lines[2]
    assert lines[2].endswith("rank 1 (fetching, 10%); 1 rank still to join")
    assert invoke("restores", run, "--url", daemon.url, "-o", "id").stdout.split() == [failed, job]
    assert invoke("restores", "--limit", 1, "--url", daemon.url, "-o", "id").stdout.split() == [failed]


def test_one_shows_its_ranks_the_slowest_first(daemon: Daemon, job: str, run: str) -> None:
    facts, _, ranks = invoke("restores", job, "--url", daemon.url).stdout.partition("\n\n")
    assert f"{run}@40." in facts
    assert "1 restored, 3 joined, of 4 ranks" in facts
    assert "behind      rank 1, 3" in facts
    rows = [line.split() for line in ranks.splitlines()]
    assert rows[0] == ["RANK", "PHASE", "DONE", "BYTES", "OF", "REPORTED", "PROBLEM"]
    assert [row[:3] for row in rows[1:]] == [
        ["1", "fetching", "10%"], ["2", "fetching", "80%"], ["0", "restored", "100%"],
    ]  # fmt: skip


def test_json_output_equals_the_daemons_answer(daemon: Daemon, client: DaemonClient, job: str, run: str) -> None:
    one = invoke("restores", job, "--url", daemon.url, "-o", "json").json
    assert (one["id"], one["state"], one["stragglers"], len(one["ranks"])) == (job, "restoring", [1, 3], 3)
    (listed,) = invoke("restores", run, "--url", daemon.url, "-o", "json").json
    assert (listed["id"], listed["ranks"], listed["slowest"]["rank"]) == (job, None, 1)
    lines = invoke("restores", run, "--url", daemon.url, "-o", "jsonl").stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [job]
    assert invoke("restores", job, "--url", daemon.url, "-o", "id").stdout.split() == [job]


def test_an_empty_list_is_reported(daemon: Daemon, run: str) -> None:
    done = invoke("restores", run, "--url", daemon.url)
    assert (done.code, done.stdout, done.stderr) == (0, "", f"no restores at {daemon.url}\n")
    assert invoke("restores", run, "--watch", "--url", daemon.url).code == 0


def test_a_watch_prints_each_change_once(daemon: Daemon, client: DaemonClient, job: str, run: str) -> None:
    with started("restores", run, "--watch", "--url", daemon.url) as (watching, lines):
        first = lines.next()
        assert first == f"{job}  {run}@40  restoring  1/4 ranks  47%  rank 1 (fetching, 10%); 1 rank still to join\n"
        client.report_restore(job, 1, Phase.RESTORED, 2048, 2048)
        assert "2/4 ranks  70%  rank 2 (fetching, 80%)" in lines.next()
        client.report_restore(job, 3, Phase.FAILED, problem="out of memory")
        assert lines.next() == f"{job}  {run}@40  failed  2/4 ranks  rank 3 failed: out of memory\n"
        assert (lines.next(), watching.wait(60)) == ("", 0)


def test_a_watch_gives_programs_an_object_a_line(daemon: Daemon, client: DaemonClient, job: str, run: str) -> None:
    client.cancel_restore(job)
    done = invoke("restores", job, "--watch", "--url", daemon.url, "-o", "jsonl")
    assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["cancelled"]


def test_at_a_terminal_a_watch_redraws_until_the_end(daemon: Daemon, client: DaemonClient, job: str, run: str) -> None:
    with Terminal("restores", job, "--watch", "--url", daemon.url, columns=120) as terminal:
        terminal.wait_for("10%")
        client.report_restore(job, 1, Phase.PLACING, 1024, 2048)
        terminal.wait_for("placing")
        for rank in (1, 2, 3):
            client.report_restore(job, rank, Phase.RESTORED, 2048, 2048)
        assert terminal.finish() == 0
        assert "4 restored, 4 joined, of 4 ranks" in terminal.screen


def test_a_watch_can_be_interrupted(daemon: Daemon, job: str, run: str) -> None:
    with Terminal("restores", run, "--watch", "--url", daemon.url, columns=120) as terminal:
        terminal.wait_for("restoring")
        terminal.interrupt()
        assert terminal.finish() == 130


def test_what_makes_no_sense(daemon: Daemon, job: str, run: str) -> None:
    for args, code in ((("01M7Y6P7WGCXV53EY39EPJ6JT8",), 4), (("../x",), 2), ((job, run), 2)):
        assert invoke("restores", *args, "--url", daemon.url).code == code, args
