from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckptapi import bodies
from ckptstore.stores import open_store
from tests.support.checkpoints import SMALL, sample_arrays, write_checkpoint
from tests.support.daemons import Daemon, running_daemon

Body = dict[str, Any]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Three runs with steps in a random order of commits; bert_large has no loss."""
    folder: Path = tmp_path_factory.mktemp("listed")
    store, chosen = open_store(str(folder / "store")), random.Random(0)
    wanted = [(run, step) for run in ("gpt", "gpt-2", "bert_large") for step in range(0, 80, 10)]
    chosen.shuffle(wanted)
    for run, step in wanted:
        metrics = {"loss": chosen.random() * 4, "acc": step / 80} if run != "bert_large" else {}
        write_checkpoint(store, run, step, SMALL, metrics)
    with running_daemon(store.url) as running:
        yield running


def everything(daemon: Daemon, query: str = "", limit: int = 7) -> list[Body]:
    found: list[Body] = []
    path = f"{bodies.CHECKPOINTS}?limit={limit}&{query}"
    while True:
        answer = daemon.get(path)
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        cursor = answer.json()["next_cursor"]
        assert (cursor is None) == ("link" not in answer.headers)
        if cursor is None:
            return found
        path = httpx.URL(answer.links["next"]["url"]).raw_path.decode()


@pytest.mark.parametrize(
    ("sort", "key"),
    [
        ("run", lambda c: (c["run"], -c["step"])),
        ("step", lambda c: (c["step"], c["run"])),
        ("-step", lambda c: (-c["step"], c["run"])),
        ("committed_at", lambda c: c["committed_at"]),
        ("-committed_at", lambda c: -c["committed_at"]),
        ("stored_bytes", lambda c: (c["stored_bytes"], c["run"], -c["step"])),
        ("-stored_bytes", lambda c: (-c["stored_bytes"], c["run"], -c["step"])),
    ],
)
@pytest.mark.parametrize("run", ["", "gpt", "*pt*"])
def test_every_order_has_every_checkpoint_once(daemon: Daemon, sort: str, key: Callable[[Body], Any], run: str) -> None:
    found = everything(daemon, f"sort={sort}" + (f"&run={run}" if run else ""))
    assert (len(found), found) == ({"": 24, "gpt": 8, "*pt*": 16}[run], sorted(found, key=key))
    assert len({c["id"] for c in found}) == len(found)


@pytest.mark.parametrize(
    ("query", "admits"),
    [
        ("run=gpt", lambda c: c["run"] == "gpt"),
        ("run=gpt*", lambda c: c["run"] in ("gpt", "gpt-2")),
        ("run=bert_larg?", lambda c: c["run"] == "bert_large"),
        ("run=GPT", lambda c: False),
        ("run=b%2A", lambda c: c["run"] == "bert_large"),
        ("min_step=30&max_step=50", lambda c: 30 <= c["step"] <= 50),
        ("metric=loss%3C%3D2", lambda c: c["metrics"].get("loss", 9) <= 2),
        ("metric=loss%3C%3D3.5&metric=acc%3E%3D0.5", lambda c: c["metrics"].get("loss", 9) <= 3.5 and c["step"] >= 40),
        ("metric=nope%3E%3D0", lambda c: False),
        ("state=corrupt", lambda c: False),
        ("state=committed&state=superseded&run=gpt-2", lambda c: c["run"] == "gpt-2"),
        ("since=0&until=1", lambda c: False),
    ],
)
def test_conditions(daemon: Daemon, query: str, admits: Callable[[Body], bool]) -> None:
    whole = everything(daemon)
    assert everything(daemon, query, limit=3) == [c for c in whole if admits(c)]


def test_moments_are_inclusive(daemon: Daemon) -> None:
    by_time = everything(daemon, "sort=committed_at")
    least, most = by_time[5]["committed_at"], by_time[9]["committed_at"]
    assert everything(daemon, f"sort=committed_at&since={least!r}&until={most!r}") == by_time[5:10]


def test_a_cursor_belongs_to_its_order(daemon: Daemon) -> None:
    cursor = daemon.get(f"{bodies.CHECKPOINTS}?limit=1&sort=step").json()["next_cursor"]
    answer = daemon.get(f"{bodies.CHECKPOINTS}?limit=1&sort=-step&cursor={cursor}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize(
    "query",
    ["sort=x", "sort=metrics", "state=x", "min_step=-1", "min_step=9999999999999", "since=nan", "since=inf", "until=x",
     "metric=loss", "metric=loss<1", "metric=loss>=x", "metric=loss>=1e9999", "metric=" + "x" * 500 + ">=1",
     "run=a~b", "run=..", "run=[a-z]", "run=%00", "run=" + "*" * 200,
     "&".join(f"metric=m{n}>=1" for n in range(20)), "&".join(["state=corrupt"] * 50)],
)  # fmt: skip
def test_conditions_that_are_none(daemon: Daemon, query: str) -> None:
    answer = daemon.get(f"{bodies.CHECKPOINTS}?{query}")
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] in ("invalid_request", "invalid_name")


def test_shards_and_entries(daemon: Daemon, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    id = write_checkpoint(store, "gpt", 1).id
    with running_daemon(store.url) as running:
        (shard,) = running.get(f"/v1/checkpoints/{id}/shards").json()["items"]
        assert (shard["name"], shard["rank"]) == ("shard-00000.ckpt", 0)
        assert shard["raw_bytes"] == sum(array.nbytes for array in sample_arrays().values())
        entries = running.get(f"/v1/checkpoints/{id}/entries?limit=2").json()
        assert (entries["total"], entries["next_offset"], len(entries["items"])) == (5, 2, 2)
        rest = running.get(f"/v1/checkpoints/{id}/entries?offset=2").json()
        names = [entry["name"] for entry in entries["items"] + rest["items"]]
        assert sorted(names) == sorted(sample_arrays())
        by_name = {entry["name"]: entry for entry in entries["items"] + rest["items"]}
        assert by_name["model/weight"]["shape"] == [700, 1024]
        assert by_name["model/weight"]["raw_bytes"] == 700 * 1024 * 4
        assert running.get(f"/v1/checkpoints/{id}/entries?offset=99999999").json()["items"] == []
