"""The locks of trainer and saver: named by the store wherever it is written from, in a folder of one user."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.saver.lock import SaverLock, wait_for_orphans
from ckptstore.errors import InvalidRequest, RunVanished
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty temporary directory."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_relative_store_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    model = nn.Linear(4, 4)
    with Checkpointer("ckpts", run="r") as checkpointer:
        monkeypatch.chdir(tmp_path / "two")
        checkpointer.save(model, None, 1)
    monkeypatch.chdir(tmp_path / "one")
    with Checkpointer("./ckpts", run="r") as checkpointer:
        monkeypatch.chdir(tmp_path / "three")
        checkpointer.save(model, None, 2)
        latest = checkpointer.latest()
        assert latest is not None
        assert latest.step == 2
        nn.init.zeros_(model.weight)
        restored = checkpointer.restore(model, checkpoint=1)
        assert restored is not None
        assert torch.count_nonzero(model.weight)
    for spelling in (str(tmp_path / "one/ckpts"), f"file://{tmp_path}/one/ckpts", "../one/ckpts"):
        with Checkpointer(spelling, run="r") as checkpointer:
            checkpointer.save(model, None, 3)
    assert len({path.stem for path in (temporary / f"ckpt-{os.getuid()}").iterdir() if path.is_file()}) == 1
    assert not [path for name in ("two", "three") for path in (tmp_path / name).iterdir()]


def _of_another_user(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)


def _link(folder: Path) -> None:
    target = folder.with_name("elsewhere")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o770)


@pytest.mark.parametrize(
    ("prepare", "problem"),
    [
        (_of_another_user, "belongs to user 65534"),
        (_link, "is not a folder"),
        (Path.touch, "is not a folder"),
        (_open_to_others, "has mode 0770"),
    ],
)
def test_a_folder_of_locks_that_others_can_reach_is_refused(
    prepare: Callable[[Path], None], problem: str, temporary: Path
) -> None:
    prepare(temporary / f"ckpt-{os.getuid()}")
    with pytest.raises(InvalidRequest, match=problem) as caught:
        SaverLock("file:///store", "r")
    assert "set TMPDIR" in caught.value.hint
    with pytest.raises(InvalidRequest, match=problem):
        wait_for_orphans("file:///store", "r", timeout_s=30)


def test_ranks_that_test_the_locks_at_the_same_time_do_not_take_each_other_for_a_live_trainer(temporary: Path) -> None:
    store, ranks = "file:///store", 8
    orphan = SaverLock(store, "r")
    orphan.close()  # the trainer's lock alone

    def tests(_: int) -> list[bool]:
        return [wait_for_orphans(store, "r", timeout_s=0.0) for _ in range(200)]

    with ThreadPoolExecutor(ranks) as pool:
        assert not any(any(found) for found in pool.map(tests, range(ranks))), "one did not wait for the orphan"
    os.close(orphan.saver)
    with ThreadPoolExecutor(ranks) as pool:
        assert all(pool.map(lambda _: wait_for_orphans(store, "r", timeout_s=60.0), range(ranks)))


def test_a_save_with_such_a_folder_is_refused(temporary: Path, tmp_path: Path) -> None:
    _open_to_others(temporary / f"ckpt-{os.getuid()}")
    with (
        Checkpointer(str(tmp_path / "store"), run="r") as checkpointer,
        pytest.raises(InvalidRequest, match="has mode 0770"),
    ):
        checkpointer.save(nn.Linear(2, 2), None, 1)


@pytest.mark.parametrize("seen_by", ["a save", "a restore"])
def test_a_run_that_had_checkpoints_here_does_not_begin_again_in_an_empty_store(
    tmp_path: Path, temporary: Path, seen_by: str
) -> None:
    """The volume is not mounted: its mount point is an empty folder."""
    store, away, model = tmp_path / "store", tmp_path / "away", nn.Linear(2, 2)
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model) is None, "a new run"
        checkpointer.prepare(model, None)
        checkpointer.save(model, None, 1)
    if seen_by == "a restore":
        shutil.rmtree(temporary / f"ckpt-{os.getuid()}")
        with Checkpointer(str(store), run="r") as checkpointer:
            assert checkpointer.restore(model) is not None
    store.rename(away)
    store.mkdir()
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        begins: list[Callable[[], object]] = [
            lambda: checkpointer.restore(model),
            lambda: checkpointer.prepare(model, None),
        ]
        for begin in begins:
            with pytest.raises(RunVanished, match="nothing of run 'r', which had checkpoints on this host") as caught:
                begin()
    note = Path(caught.value.hint.rsplit(" ", 1)[1])
    assert note.read_text() == f"file://{store} r\n"
    note.unlink()
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model) is None, "it was deleted on purpose"


def test_a_run_whose_checkpoints_were_deleted_begins_again(tmp_path: Path, temporary: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(str(tmp_path / "store"), run="r", writer="thread") as checkpointer:
        saved = checkpointer.save(model, None, 1)
    StoreOperator(open_store(str(tmp_path / "store"))).delete(saved, 0.0, force=True)
    with Checkpointer(str(tmp_path / "store"), run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model) is None
        checkpointer.prepare(model, None)
        assert checkpointer.save(model, None, 1).step == 1
