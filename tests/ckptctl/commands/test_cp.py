from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from ckptstore.analysis.statistics import read_statistics
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, latest, list_checkpoints
from ckptstore.commits.generations import Session, begin_generation
from ckptstore.commits.labels import LabelChange, change_labels
from ckptstore.names import Reference, new_ulid
from ckptstore.reading.source import StoreSource, read_local, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from ckptstore.tiers.copying import copy_checkpoint
from tests.support.checkpoints import failing_at_every_call, flip, read_all, write_checkpoint
from tests.support.command_line import invoke, started, succeed
from tests.support.daemons import running_daemon
from tests.support.stores import Mode
from tests.support.waiting import wait_until


@pytest.fixture
def there(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


def same(store: Store, original: Checkpoint, target: Store, copy: Checkpoint) -> None:
    assert verify(StoreSource(target), copy).ok
    assert read_all(StoreSource(target), copy) == read_all(StoreSource(store), original)
    assert (copy.step, copy.metrics, copy.world_size) == (original.step, original.metrics, original.world_size)
    one, other = read_manifest(StoreSource(store), original), read_manifest(StoreSource(target), copy)
    assert read_local(StoreSource(store), original, one, 0) == read_local(StoreSource(target), copy, other, 0)
    assert one.content.trees == other.content.trees


def test_a_run_is_copied_and_again_costs_nothing(folder: Path, filled: Store, there: Path) -> None:
    change_labels(Run(filled, "gpt"), latest(Run(filled, "gpt")).attempt, LabelChange({"paper": ""}, {"val": 2.0}))
    meant = succeed("cp", "gp*", "--to", there, "--dry-run", "--store", folder, "-o", "json").json
    assert not any(there.rglob("*.json"))
    done = succeed("cp", "gp*", "--to", there, "--store", folder, "-o", "json")
    assert [body["original"] for body in done.json] == [body["id"] for body in meant]
    assert [body["existed"] for body in done.json] == [False] * 4
    target = open_store(str(there))
    copies = list_checkpoints(Run(target, "gpt"))
    assert [c.step for c in copies] == [40, 30, 20, 10]
    source = StoreSource(filled)
    for copy in copies:
        original = source.find(Reference("gpt", copy.step))
        same(filled, original, target, StoreSource(target).find(Reference("gpt", copy.step)))
    assert StoreSource(target).latest("gpt").tags == {"paper": ""}
    files = {path: path.stat().st_mtime_ns for path in there.rglob("*.ckpt")}
    again = invoke("cp", "gpt", "--to", there, "--store", folder, "-o", "json").json
    assert [body["existed"] for body in again] == [True] * 4
    assert {path: path.stat().st_mtime_ns for path in there.rglob("*.ckpt")} == files


def test_chunks_of_earlier_checkpoints_come_along(folder: Path, filled: Store, there: Path) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {
        "model/a": np.arange(100_000, dtype=np.int64),
        "model/b": np.zeros(1000, np.float32),
    }
    base = write_checkpoint(filled, "inc", 1, arrays=arrays)
    original = write_checkpoint(
        filled, "inc", 2, arrays=arrays | {"model/b": np.ones(1000, np.float32)}, base=base.attempt
    )
    assert original.referenced_bytes
    assert invoke("cp", "inc@2", "--to", there, "--as", "alone", "--store", folder).code == 0
    target = open_store(str(there))
    copy = latest(Run(target, "alone"))
    assert copy.referenced_bytes == 0
    same(filled, original, target, copy)


@pytest.mark.parametrize("statistics", [True, "apart"])
@pytest.mark.parametrize("changed", [0, 1])
def test_statistics_come_along(folder: Path, there: Path, changed: int, statistics: Literal[True, "apart"]) -> None:
    """Those of a shard, and those of a rank without one, which references all; through a daemon and without."""
    store, target = open_store(str(folder)), open_store(str(there))
    arrays = {"model/a": np.arange(1000)}
    base = write_checkpoint(store, "gpt", 1, arrays, statistics=True)
    write_checkpoint(
        store, "gpt", 2, {"model/a": arrays["model/a"] + changed}, base=base.attempt, statistics=statistics
    )
    with running_daemon(folder.as_uri()) as daemon:
        for at, name in ((("--url", daemon.url), "one"), (("--store", folder), "two")):
            succeed("cp", "gpt@2", "--to", there, "--as", name, *at)
            copy = latest(Run(target, name))
            assert verify(StoreSource(target), copy).ok
            assert not read_statistics(StoreSource(target), copy).missing


def test_a_copy_through_a_daemon_joins_the_newest_generation(folder: Path, filled: Store, there: Path) -> None:
    target = open_store(str(there))
    begin_generation(Run(target, "wide"), Session(new_ulid(system_clock()), None))
    with running_daemon(folder.as_uri()) as daemon:
        done = invoke("cp", "wide@5", "--to", there, "--url", daemon.url, "-o", "id")
    assert done.code == 0, done.stderr
    copy = latest(Run(target, "wide"))
    assert (done.stdout.strip(), copy.attempt.generation) == (copy.id, 1)
    same(filled, latest(Run(filled, "wide")), target, copy)


def test_another_checkpoint_of_the_step_is_never_touched(folder: Path, filled: Store, there: Path) -> None:
    other = write_checkpoint(open_store(str(there)), "gpt", 20)
    done = invoke("cp", "gpt", "--to", there, "--store", folder)
    assert done.code == 3
    assert f"{other.id} exists" in done.stderr
    assert [c.step for c in list_checkpoints(Run(open_store(str(there)), "gpt"))] == [40, 30, 20, 10]
    assert latest(Run(open_store(str(there)), "gpt")).step == 40
    alone = invoke("cp", "gpt@20", "--to", there, "--store", folder, "-o", "json")
    assert (alone.code, alone.error["code"]) == (2, "invalid_request")
    assert "--as" in alone.error["hint"]
    assert invoke("cp", "gpt@20", "--to", folder, "--store", folder).code == 2


def test_damage_is_not_copied(folder: Path, filled: Store, there: Path) -> None:
    run = Run(filled, "gpt")
    original = latest(run)
    path = folder / run.keys.shard(original.attempt, "shard-00000.ckpt")
    flip(path, 1000)
    done = invoke("cp", "gpt@40", "--to", there, "--store", folder)
    assert done.code == 5
    assert "chunk" in done.stderr
    assert list_checkpoints(Run(open_store(str(there)), "gpt")) == []


def test_damage_of_one_does_not_keep_the_others_from_being_copied(folder: Path, filled: Store, there: Path) -> None:
    run = Run(filled, "gpt")
    damaged = next(c for c in list_checkpoints(run) if c.step == 20)
    (folder / run.keys.manifest(damaged.attempt)).write_bytes(b"?")
    done = invoke("cp", "gpt", "--to", there, "--store", folder)
    assert (done.code, damaged.id in done.stderr) == (3, True), done.stderr
    assert [c.step for c in list_checkpoints(Run(open_store(str(there)), "gpt"))] == [40, 30, 10]


@pytest.mark.parametrize("how", ["damaged", "deleted"])
def test_a_copy_that_is_damaged_or_deleted_is_made_again(folder: Path, filled: Store, there: Path, how: str) -> None:
    copy = ("cp", "gpt@40", "--to", there, "--store", folder, "-o", "json")
    assert invoke(*copy).code == 0
    if how == "damaged":
        (shard,) = there.rglob("*.ckpt")
        shard.write_bytes(bytes(shard.stat().st_size))
        assert invoke("scrub", "--store", there).code == 5
    else:
        assert invoke("rm", "gpt@40", "--yes", "--force", "--store", there).code == 0
    done = invoke(*copy)
    assert (done.code, done.json[0]["existed"]) == (0, False), done.stderr
    target = open_store(str(there))
    same(filled, latest(Run(filled, "gpt")), target, latest(Run(target, "gpt")))
    assert invoke(*copy).json[0]["existed"]


def test_labels_of_a_copy_stay_as_they_are(folder: Path, filled: Store, there: Path) -> None:
    run = Run(filled, "gpt")
    change_labels(run, latest(run).attempt, LabelChange({"paper": "", "owner": "ann"}))
    copy = ("cp", "gpt@40", "--to", there, "--store", folder, "-o", "json")
    assert invoke(*copy).json[0]["copy"]["tags"] == {"owner": "ann", "paper": ""}
    assert invoke("tag", "gpt@40", "owner=bob", "paper-", "--store", there).code == 0
    assert invoke(*copy).json[0]["copy"]["tags"] == {"owner": "bob"}


def test_no_copy_moves_a_run_back_to_an_earlier_step(folder: Path, filled: Store, there: Path) -> None:
    target = open_store(str(there))
    newest = write_checkpoint(target, "gpt", 35)
    begin_generation(Run(target, "gpt"), Session(new_ulid(system_clock()), newest.attempt))
    done = invoke("cp", "gpt", "--to", there, "--store", folder, "-o", "json")
    assert (done.code, "before step 35" in done.stderr) == (3, True), done.stderr
    assert [c.step for c in list_checkpoints(Run(target, "gpt"))] == [40, 35]
    assert latest(Run(target, "gpt")).step == 40


def test_a_copy_that_was_killed_continues(folder: Path, filled: Store, there: Path) -> None:
    big = {"model/w": np.random.default_rng(0).integers(0, 255, 60_000_000, dtype=np.uint8)}
    original = write_checkpoint(filled, "big", 1, arrays=big)
    with started("cp", "big@1", "--to", there, "--store", folder) as (process, _):
        wait_until(lambda: any(there.rglob("*.ckpt")) or process.poll() is not None, "the copy of the shard")
    succeed("cp", "big@1", "--to", there, "--store", folder)
    target = open_store(str(there))
    same(filled, original, target, latest(Run(target, "big")))
    assert len(list(there.rglob("*.ckpt"))) == 1


@pytest.mark.parametrize("mode", ["before", "after"])
def test_all_or_nothing_and_again_at_every_call(filled: Store, there: Path, mode: Mode) -> None:
    change_labels(Run(filled, "gpt"), latest(Run(filled, "gpt")).attempt, LabelChange({"paper": ""}, {"val": 2.0}))
    source, target = StoreSource(filled), open_store(str(there))
    original = source.latest("gpt")

    def copy(on: Store, _: object = None) -> Checkpoint:
        return copy_checkpoint(source, original, Run(on, "gpt"), lambda _: None).checkpoint

    for _ in failing_at_every_call(target, lambda _: None, copy, mode, more_than=8):
        for found in list_checkpoints(Run(target, "gpt")):
            assert verify(StoreSource(target), found).ok
        made, [listed] = copy(target), StoreSource(target).checkpoints("gpt")
        same(filled, original, target, listed)
        assert listed.tags == made.tags == {"paper": ""}
