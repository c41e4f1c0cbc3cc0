"""A store that does not answer is never taken for an empty one."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import httpx
import numpy.typing as npt
import pytest

from ckptapi import bodies
from ckptstore.format.records import Policy
from ckptstore.names import Reference, RunKeys
from ckptstore.reading.verify import verify
from ckptstore.retention.pruning import Prune
from ckptstore.stores import Store, open_store
from tests.conftest import S3Location
from tests.support.checkpoints import keys, sample_arrays, write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.waiting import wait_until

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
            **os.environ,
            "FSSPEC_S3_ENDPOINT_URL": f"http://127.0.0.1:{taken.getsockname()[1]}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_MAX_ATTEMPTS": "1",
        }
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
    checkpoint = write_checkpoint(store, step=1, arrays=_big())
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


def _big() -> dict[str, npt.NDArray[Any]]:
    return {f"model/{i}": sample_arrays(i)["model/weight"] for i in range(5)}
