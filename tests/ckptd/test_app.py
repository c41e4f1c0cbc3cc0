from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ckptapi import bodies
from ckptd.app import create_app
from ckptd.settings import Settings, default_db
from ckptstore import human
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.commit import read_outcome
from ckptstore.errors import CheckpointHeld
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, Reference, RunKeys, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.pruning import Prune
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.conftest import S3Location
from tests.support.checkpoints import Arrays, keys, sample_arrays, write_checkpoint, write_rank
from tests.support.command_line import invoke, succeed
from tests.support.daemons import Daemon, running_daemon
from tests.support.forking import DAEMON, run
from tests.support.stores import Faults, FaultyStore, serving
from tests.support.waiting import present, wait_until

_QUESTIONS = (
    "/checkpoints/latest?run=gpt", "/v1/checkpoints/latest?run=gpt", "/v1/checkpoints",
    "/v1/checkpoints?run=gpt&limit=2",
    "/v1/runs", "/v1/checkpoints/gpt@2", "/v1/checkpoints/gpt@latest", "/v1/checkpoints/gpt@3",
)  # fmt: skip


def _answers(daemon: Daemon) -> list[tuple[int, bytes]]:
    answers = [daemon.get(path) for path in _QUESTIONS]
    return [(answer.status_code, answer.content) for answer in answers if answer.status_code == 200]


def test_killed_or_without_its_database_it_gives_the_same_answers(store: Store, tmp_path: Path) -> None:
    for step in (1, 2, 2, 4):
        write_checkpoint(store, step=step, metrics={"loss": 0.1, "accuracy": 1 / 3})
    write_checkpoint(store, "bert", 9)
    index = tmp_path / "index.db"
    with running_daemon(store.url, f"sqlite:///{index}") as daemon:
        before = _answers(daemon)
        daemon.kill()
    assert len(before) == len(_QUESTIONS) - 1
    with running_daemon(store.url, f"sqlite:///{index}") as daemon:
        assert _answers(daemon) == before
        daemon.kill()
    for path in tmp_path.glob("index.db*"):
        path.unlink()
    with running_daemon(store.url, f"sqlite:///{index}") as daemon:
        assert _answers(daemon) == before
        with daemon.client() as client:
            assert client.reindex().checkpoints == 5
        assert _answers(daemon) == before


def test_the_index_of_another_store_is_not_believed(store: Store, tmp_path: Path) -> None:
    index = f"sqlite:///{tmp_path / 'index.db'}"
    write_checkpoint(store, step=1)
    with running_daemon(store.url, index) as daemon:
        assert daemon.get("/checkpoints/latest").status_code == 200
    with running_daemon(str(tmp_path / "empty"), index) as daemon:
        assert daemon.get("/checkpoints/latest").status_code == 404


def test_it_sees_what_happens_behind_its_back(store: Store) -> None:
    with running_daemon(store.url) as daemon, daemon.client() as client:
        assert daemon.latest_step() == -1
        write_checkpoint(store, step=1)
        wait_until(lambda: daemon.latest_step() == 1, "learning of a commit")
        second = write_checkpoint(store, step=2)
        wait_until(lambda: daemon.latest_step() == 2, "learning of another")
        again = write_checkpoint(store, step=2)
        wait_until(lambda: client.latest("gpt") == again, "superseding")
        delete_checkpoint(Run(store, again.run), again.attempt, "test", force=True)
        wait_until(lambda: client.latest("gpt") == second, "the superseded one's return")
        delete_checkpoint(Run(store, second.run), second.attempt, "test", force=True)
        wait_until(lambda: daemon.latest_step() == 1, "learning of a deletion")


def test_it_commits_what_a_dead_committer_left(store: Store) -> None:
    with running_daemon(store.url) as daemon:
        attempt = Attempt(3, new_ulid(system_clock()))
        write_rank(store, "gpt", attempt, sample_arrays(), rank=0, world_size=2)
        time.sleep(1)  # longer than the grace: half a checkpoint must not be committed however long it lies
        assert read_outcome(Run(store, "gpt"), attempt) is None
        write_rank(store, "gpt", attempt, {}, rank=1, world_size=2)
        wait_until(lambda: daemon.latest_step() == 3, "rolling forward")
        assert "ckptd_rolled_forward_total 1.0" in daemon.get("/metrics").text


def test_the_time_of_runs_waits_for_the_first_listing(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The index is as it was left, and the runs are still being listed when the daemon leads."""
    write_checkpoint(store, arrays={})

    class Slow(Faults):
        def around(self, what: str, call: Callable[[], Any]) -> Any:
            if "gpt" in what and not any("gpt" in call for call in self.calls):
                time.sleep(1.0)
            return super().around(what, call)

    settings = Settings(store=store.url, auth="off", db=f"sqlite:///{tmp_path}/index.db", poll_seconds=0.1)
    with serving(create_app(settings, FaultyStore(store, Slow()))) as url:
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_it_collects_orphans(store: Store) -> None:
    attempt = Attempt(3, new_ulid(system_clock()))
    write_rank(store, "gpt", attempt, sample_arrays(), rank=0, world_size=2)
    eager = ("--collect-seconds", "0.2", "--orphan-grace-seconds", "0")
    with running_daemon(store.url, options=eager) as daemon, daemon.client() as client:
        wait_until(lambda: "ckptd_orphans_aborted_total 1.0" in daemon.get("/metrics").text, "giving up")
        assert present(read_outcome(Run(store, "gpt"), attempt)).committed is None
        assert not list(store.list("gpt/attempts/"))
        wait_until(lambda: client.runs() == ["gpt"], "listing")
        assert client.checkpoints("gpt") == []


def test_it_tells_what_waits_to_be_freed(store: Store) -> None:
    hidden = write_checkpoint(store, step=1)
    write_checkpoint(store, step=2)
    delete_checkpoint(Run(store, hidden.run), hidden.attempt, "test", grace_s=3600.0, force=True)
    orphan, fresh = (Attempt(step, new_ulid(system_clock())) for step in (3, 4))
    for attempt in (orphan, fresh):
        write_rank(store, "gpt", attempt, sample_arrays(), rank=0, world_size=2)
    sizes = {
        attempt: sum(info.bytes for info in store.list(RunKeys("gpt").attempt(attempt)))
        for attempt in (hidden.attempt, orphan)
    }
    for path in Path(store.url.removeprefix("file://"), "gpt", "attempts", str(orphan)).iterdir():
        os.utime(path, (system_clock() - 7200,) * 2)
    with running_daemon(store.url, options=("--collect-seconds", "0.2")) as daemon:
        expected = {"ckptd_tombstoned_bytes": sizes[hidden.attempt], "ckptd_orphan_bytes": sizes[orphan]}
        wait_until(lambda: {name: daemon.metric(name) for name in expected} == expected, "measuring")
        assert f"{human.size(sum(expected.values()))}<small>" in daemon.get("/store").text


def test_sigterm_is_announced_then_ends_with_0(store: Store) -> None:
    write_checkpoint(store, step=1)
    with running_daemon(store.url, options=("--notice-seconds", "600")) as daemon:
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: daemon.get("/readyz").status_code == 503, "saying so in /readyz")
        assert daemon.get("/livez").status_code == 200
        assert daemon.get("/checkpoints/latest").status_code == 200
        daemon.process.send_signal(signal.SIGTERM)  # the second signal ends the notice
        assert daemon.process.wait(60) == 0
        with pytest.raises(httpx.TransportError):
            daemon.get("/livez")
    with running_daemon(store.url, options=("--notice-seconds", "0.1")) as daemon:
        assert daemon.stop() == 0


def test_killed_while_commits_arrive_it_loses_none(store: Store, tmp_path: Path) -> None:
    index, step = f"sqlite:///{tmp_path / 'index.db'}", 0
    for _ in range(3):
        with running_daemon(store.url, index) as daemon, daemon.client() as client:
            for _ in range(5):
                step += 1
                client.notify("gpt", write_checkpoint(store, step=step, arrays={}).attempt)
            write_checkpoint(store, step=1000 + step, arrays={})
            daemon.kill()
            with pytest.raises(httpx.TransportError):
                daemon.get("/livez")
    with running_daemon(store.url, index) as daemon, daemon.client() as client:
        assert len(client.checkpoints("gpt")) == 18


def test_memory_stays_small_while_a_big_shard_is_read(store: Store) -> None:
    incompressible = np.frombuffer(np.random.default_rng(0).bytes(192 << 20), dtype=np.uint8)
    checkpoint = write_checkpoint(store, step=1, arrays={"model/big": incompressible})
    with running_daemon(store.url) as daemon:
        url = f"{daemon.url}/v1/checkpoints/{checkpoint.id}/shards/shard-00000.ckpt"
        before = daemon.peak_kib()
        with httpx.stream("GET", url, timeout=60) as response:
            size = sum(map(len, response.iter_bytes(1 << 20)))
        assert size == int(response.headers["content-length"])
        assert daemon.peak_kib() - before < 64 << 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--host", "0.0.0.0", "--auth", "off"), "with auth off"), (("--store", "nosuch://x"), "nosuch"),
        (("--store", "memory://x"), "one process"), (("--db", "nonsense"), "database URL"),
        (("--db", "sqlite://"), "in-memory"),
        (("--db", "sqlite:////proc/nowhere/index.db"), "cannot create the folder"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_end_it_with_a_sentence(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    standard = ("--store", str(tmp_path / "store"), "--db", f"sqlite:///{tmp_path / 'index.db'}", "--port", "0")
    code, _, complaint = run(DAEMON, "ckptd", ["serve", *standard, *arguments])
    assert code in (2, 7), complaint
    assert says in complaint
    assert "Traceback" not in complaint


def test_the_default_index_is_one_file_for_each_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_db("file:///a").startswith(f"sqlite:///{tmp_path}/ckptd/")
    assert default_db("file:///a") != default_db("file:///b")


_NEGATIVE = (
    "/checkpoints/latest?run=none", "/v1/checkpoints/gpt@77", "/v1/checkpoints/none@latest", "/v1/checkpoints?run=none",
)  # fmt: skip
_POSITIVE = ("/checkpoints/latest", "/v1/checkpoints/gpt@1", "/v1/checkpoints?run=gpt", "/v1/runs")


def _unavailable(answer: httpx.Response) -> None:
    problem = answer.json()
    assert (answer.status_code, problem["code"], problem["retryable"]) == (503, "store_unavailable", True), problem
    assert int(answer.headers["retry-after"]) > 0


def _unready(daemon: Daemon) -> bool:
    return daemon.get("/readyz").status_code == 503


@pytest.mark.parametrize("replaced_by", ["nothing", "an empty folder", "a file"])
def test_a_store_that_vanishes_is_unavailable_not_empty(store: Store, tmp_path: Path, replaced_by: str) -> None:
    write_checkpoint(store, step=1)
    root, away = tmp_path / "store", tmp_path / "away"
    with running_daemon(store.url) as daemon:
        assert [daemon.get(path).status_code for path in _NEGATIVE] == [404, 404, 404, 200]
        root.rename(away)
        if replaced_by == "an empty folder":
            root.mkdir()
        elif replaced_by == "a file":
            root.touch()
        # Not by /readyz: a round that began before may have failed for one run only, and answers for others.
        wait_until(lambda: daemon.get(_NEGATIVE[0]).status_code == 503, "noticing")
        assert _unready(daemon)
        for path in _NEGATIVE:
            _unavailable(daemon.get(path))
        for path in _POSITIVE:
            assert daemon.get(path).status_code == 200
        assert daemon.get("/livez").status_code == 200
        assert "ckptd_store_errors_total{" in daemon.get("/metrics").text
        if root.exists():
            root.rmdir() if root.is_dir() else root.unlink()
        away.rename(root)
        wait_until(lambda: not _unready(daemon), "recovering")
        assert [daemon.get(path).status_code for path in _NEGATIVE] == [404, 404, 404, 200]


def test_a_restart_without_the_store_answers_nothing(store: Store, tmp_path: Path) -> None:
    write_checkpoint(store, step=1)
    index = f"sqlite:///{tmp_path / 'index.db'}"
    with running_daemon(store.url, index):
        pass
    (tmp_path / "store").rename(tmp_path / "away")
    with running_daemon(store.url, index, ready=False) as daemon:
        for path in (*_NEGATIVE, *_POSITIVE):
            _unavailable(daemon.get(path))
        assert _unready(daemon)


def test_a_folder_that_does_not_exist_is_said_and_never_created(tmp_path: Path) -> None:
    mistyped = tmp_path / "no" / "store"
    with running_daemon(str(mistyped), ready=False) as daemon:
        wait_until(lambda: f"there is no folder {mistyped}" in daemon.log(), "saying so")
        assert f"there is no folder {mistyped}" in daemon.get("/readyz").json()["store"]
        _unavailable(daemon.post(bodies.REINDEX))
        _unavailable(daemon.get("/v1/checkpoints/gpt@1"))
        assert not daemon.post(bodies.PROBE).json().get("ok")
        assert not mistyped.parent.exists()
        mistyped.mkdir(parents=True)
        wait_until(lambda: not _unready(daemon), "readiness")


def test_a_store_emptied_on_purpose_is_believed_after_reindex(store: Store, tmp_path: Path) -> None:
    write_checkpoint(store, step=1)
    with running_daemon(store.url) as daemon:
        (tmp_path / "store").rename(tmp_path / "away")
        wait_until(lambda: _unready(daemon), "noticing")
        assert daemon.post(bodies.REINDEX).json()["code"] == "store_unavailable", (
            "nothing is listed, so it is no answer"
        )
        (tmp_path / "store").mkdir()
        assert daemon.post(bodies.REINDEX).json() == {"runs": 0, "checkpoints": 0}
        assert daemon.get("/checkpoints/latest").status_code == 404
        wait_until(lambda: not _unready(daemon), "readiness")


def test_a_run_deleted_by_hand_is_forgotten(store: Store, tmp_path: Path) -> None:
    write_checkpoint(store, step=1)
    write_checkpoint(store, "bert", 1)
    with running_daemon(store.url) as daemon:
        (tmp_path / "store" / "gpt").rename(tmp_path / "away")
        wait_until(lambda: daemon.get("/checkpoints/latest?run=gpt").status_code == 404, "forgetting")
        assert daemon.get("/checkpoints/latest?run=bert").status_code == 200


def test_an_object_store_that_refuses_connections_is_503() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening: connections are refused
        environment = {
            **os.environ, "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_MAX_ATTEMPTS": "1",
        }  # fmt: skip
        with running_daemon("s3://bucket/prefix", environment=environment, ready=False) as daemon:
            for path in (*_NEGATIVE, *_POSITIVE):
                _unavailable(daemon.get(path))
            assert _unready(daemon)
            assert daemon.get("/livez").status_code == 200
            notification = {"run": "gpt", "attempt": "000000000001-01M7Y6P7VAK6GS7DP3ANWJVNJ3"}
            _unavailable(daemon.post(bodies.NOTIFY, notification))


def test_a_restore_from_an_object_store_needs_no_credentials(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)
    for step in (1, 2):
        write_checkpoint(store, step=step)
    with running_daemon(s3_store.url, environment=s3_store.environment) as daemon, daemon.client() as client:
        checkpoint = client.find(Reference("gpt", 2))
        assert verify(client, checkpoint).ok
        client.prune(Prune(Policy(1), grace_s=0))
        assert [c.step for c in client.checkpoints("gpt")] == [2]
        assert [key.split("/")[2] for key in keys(store, "gpt/attempts/")] == [str(checkpoint.attempt)] * 3


def test_an_answer_that_cannot_be_finished_is_cut_off_not_padded(store: Store, tmp_path: Path) -> None:
    big = {f"model/{i}": sample_arrays(i)["model/weight"] for i in range(5)}
    checkpoint = write_checkpoint(store, step=1, arrays=big)
    path = tmp_path / "store" / RunKeys("gpt").shard(checkpoint.attempt, "shard-00000.ckpt")
    with running_daemon(store.url, options=["--cache-bytes", "0"]) as daemon:
        url = f"{daemon.url}/v1/checkpoints/{checkpoint.id}/shards/shard-00000.ckpt"
        size = int(httpx.head(url).headers["content-length"])
        os.truncate(path, size - 1000)
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url)
        path.unlink()
        answer = httpx.get(url)
        assert (answer.status_code, answer.json()["code"]) == (404, "object_missing")
        assert "Traceback" not in daemon.log()
        assert "corrupt:" in daemon.log()
        assert daemon.get("/livez").status_code == 200


def test_a_daemon_serves_and_keeps_what_is_referenced(tmp_path: Path) -> None:
    """By two checkpoints: the larger chunk of the first."""
    store, written = open_store(str(tmp_path)), list[Checkpoint]()
    for step in (1, 2, 3):
        arrays: Arrays = {"model/frozen": np.arange(50_000, dtype=np.int64), "model/step": np.array(step, np.int32)}
        base = written[-1].attempt if written else None
        written.append(write_checkpoint(store, "gpt", step, arrays, base=base))
    first, second, third = written
    with running_daemon(f"file://{tmp_path}") as daemon, daemon.client() as client:
        listed = client.checkpoints("gpt")
        assert listed == StoreSource(open_store(str(tmp_path))).checkpoints("gpt")
        assert [c.referenced_bytes for c in listed] == [third.referenced_bytes, second.referenced_bytes, 0]
        assert all(verify(client, checkpoint).ok for checkpoint in listed)
        with pytest.raises(CheckpointHeld, match=f"referenced:{third.id}"):
            client.delete(first, 0.0)
        client.delete(second, 0.0)
        assert verify(client, third).ok
        shown = succeed("show", third.id, "--url", daemon.url)
        assert first.id in shown.stdout
        assert "referenced" in shown.stdout
        (shard,) = invoke("show", third.id, "--url", daemon.url, "-o", "json").json["shards"]
        assert (shard["stored_bytes"], shard["referenced_bytes"]) == (third.stored_bytes, third.referenced_bytes)
        client.delete(third, 0.0, force=True)
        client.delete(first, 0.0, force=True)
        assert client.checkpoints("gpt") == []
