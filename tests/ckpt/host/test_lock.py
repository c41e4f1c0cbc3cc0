"""The locks of trainer and saver: named by the store wherever it is written from, in a folder of one user."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from ckpt import Checkpoint, Checkpointer, Restored
from ckpt.host import lock as locks
from ckpt.host.lock import (
    KNOWN,
    LOCAL,
    SaverLock,
    hold_folder,
    host_path,
    note_checkpoint,
    noted_checkpoint,
    sweep_folder,
    temporary_folder,
    touch_locks,
    try_lock,
    wait_for_orphans,
)
from ckptstore.errors import InvalidRequest, RunVanished, Unavailable
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store
from tests.ckpt.saver.looking import RUN, forked, looks
from tests.support.forking import ROOT
from tests.support.waiting import present, wait_until

STORE = "file:///store"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def test_a_relative_store_survives_a_chdir(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert present(checkpointer.latest()).step == 2
        nn.init.zeros_(model.weight)
        assert checkpointer.restore(model, checkpoint=1) is not None
        assert torch.count_nonzero(model.weight)
    for spelling in (str(tmp_path / "one/ckpts"), f"file://{tmp_path}/one/ckpts", "../one/ckpts"):
        with Checkpointer(spelling, run="r", writer="thread") as checkpointer:
            checkpointer.save(model, None, 3)
    files = [path for path in (temporary / f"ckpt-{os.getuid()}").iterdir() if path.is_file()]
    assert len({path.stem for path in files if path.suffix not in (f".{KNOWN}", f".{LOCAL}")}) == 1
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
        (_of_another_user, "belongs to user 65534"), (_link, "is not a folder"), (Path.touch, "is not a folder"),
        (_open_to_others, "has mode 0770"),
    ],
)  # fmt: skip
def test_locks_in_reach_of_others_are_refused(prepare: Callable[[Path], None], problem: str, temporary: Path) -> None:
    prepare(temporary / f"ckpt-{os.getuid()}")
    with pytest.raises(InvalidRequest, match=problem) as caught:
        SaverLock(STORE, RUN)
    assert "set TMPDIR" in caught.value.hint
    with pytest.raises(InvalidRequest, match=problem):
        wait_for_orphans(STORE, RUN, timeout_s=30)
    with (
        Checkpointer(str(temporary.with_name("store")), run="r") as checkpointer,
        pytest.raises(InvalidRequest, match=problem),
    ):
        checkpointer.save(nn.Linear(2, 2), None, 1)


def _orphan(store: str) -> int:
    """The descriptor of a saver's lock whose trainer is gone."""
    lock = SaverLock(store, RUN)
    saver = os.dup(lock.saver)
    lock.close()
    return saver


def test_ranks_that_test_the_locks_at_the_same_time_do_not_take_each_other_for_a_live_trainer(temporary: Path) -> None:
    orphan, ranks = _orphan(STORE), 4
    with ProcessPoolExecutor(ranks, multiprocessing.get_context("spawn")) as pool:
        assert not any(any(found) for found in pool.map(looks, [STORE] * ranks)), "one did not wait for the orphan"
        os.close(orphan)
        assert all(all(found) for found in pool.map(looks, [STORE] * ranks))


def test_a_child_that_is_forked_during_a_test_holds_no_lock(temporary: Path) -> None:
    command = [sys.executable, "-m", "tests.ckpt.saver.looking", STORE]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []


def test_all_spellings_of_a_store_have_the_same_files(temporary: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    for one, other in ((f"file://{tmp_path}/store", f"file://{tmp_path}/link"), ("s3://bucket/a", "s3://bucket/a/")):
        assert host_path(one, RUN, "saver") == host_path(other, RUN, "saver")
    assert host_path("s3://bucket/a", RUN, "saver") != host_path("s3://bucket/b", RUN, "saver")


def test_a_lock_that_is_released_is_free_although_a_child_was_forked(temporary: Path) -> None:
    with suppress(InvalidRequest), try_lock(STORE, RUN, "replicator"):
        child, end = forked()
        raise InvalidRequest("as a replicator whose store is away", "")
    with try_lock(STORE, RUN, "replicator") as free:
        assert free
    end()
    os.waitpid(child, 0)


@pytest.mark.parametrize("first", ["prepare", "latest"])
def test_prepare_and_latest_wait_for_the_orphan(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """After prepare this process would count as the live trainer of its predecessor's saver; by latest, a job chooses
    where to resume."""
    waits, model = threading.Event(), nn.Linear(2, 2)

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr("ckpt.host.lock.time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))

    def save_and_end() -> None:
        waits.wait()
        with Checkpointer(str(tmp_path), run=RUN, writer="thread") as earlier:
            earlier.save(model, None, 2)
        os.close(orphan)

    with Checkpointer(str(tmp_path), run=RUN, writer="thread") as earlier:
        earlier.save(model, None, 1)
    orphan = _orphan(f"file://{tmp_path}")
    with Checkpointer(str(tmp_path), run=RUN) as checkpointer, ThreadPoolExecutor(1) as saver:
        ended = saver.submit(save_and_end)
        try:
            if first == "prepare":
                checkpointer.prepare(model, None)
                newest: Checkpoint | Restored | None = checkpointer.restore(model)
            else:
                newest = checkpointer.latest()
        finally:
            waits.set()
        ended.result()
    assert newest is not None
    assert newest.step == 2


def test_files_that_are_locked_are_not_old(temporary: Path) -> None:
    SaverLock(STORE, RUN).close()
    files = [host_path(STORE, RUN, role) for role in ("trainer", "saver")]

    def age() -> None:
        for file in files:
            os.utime(file, (0, 0))

    age()
    lock = SaverLock(STORE, RUN)
    assert all(file.stat().st_mtime for file in files)
    age()
    touch_locks(STORE, RUN)
    assert all(file.stat().st_mtime for file in files)
    folder = os.open(files[0].parent, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as systemd-tmpfiles
    os.close(folder)
    lock.inherited()
    lock.close()


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd-tmpfiles is not installed")
def test_systemd_keeps_old_files_that_are_locked(temporary: Path) -> None:
    lock, rule = SaverLock(STORE, RUN), temporary.with_name("rule.conf")
    rule.write_text(f"d {temporary} - - - 1us\n")
    clean = ["systemd-tmpfiles", "--clean", str(rule)]
    subprocess.run(clean, check=True, timeout=60)
    assert host_path(STORE, RUN, "trainer").exists()
    lock.inherited()
    lock.close()
    subprocess.run(clean, check=True, timeout=60)
    assert not (temporary / f"ckpt-{os.getuid()}").exists(), "the rule deletes what nobody holds"


def test_old_files_that_nobody_holds_are_removed(temporary: Path) -> None:
    held = SaverLock(STORE, RUN)
    note_checkpoint(STORE, RUN)
    note_checkpoint(STORE, "other")
    old, young = noted_checkpoint(STORE, RUN), noted_checkpoint(STORE, "other")
    assert old is not None
    assert young is not None
    # A saver may listen there for longer, and a socket cannot be locked.
    listening = old.with_name("memory") / "saver"
    listening.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(listening))
    locks = [host_path(STORE, RUN, role) for role in ("trainer", "saver")]
    for path in (*locks, old, listening):
        os.utime(path, (0, 0))
    sweep_folder()
    assert {path for path in old.parent.rglob("*") if not path.is_dir()} == {young, listening, *locks}
    held.inherited()
    held.close()


def test_a_file_that_is_deleted_before_it_is_locked_is_made_again(temporary: Path) -> None:
    path = host_path(STORE, RUN, "trainer")
    with ThreadPoolExecutor(1) as pool, try_lock(STORE, RUN, "trainer"):
        locking = pool.submit(SaverLock, STORE, RUN)
        waiting = re.compile(rf"-> FLOCK .*:{path.stat().st_ino} ")
        wait_until(lambda: waiting.search(Path("/proc/locks").read_text()))
        path.unlink()
    lock = locking.result()
    with try_lock(STORE, RUN, "trainer") as free:
        assert not free
    lock.inherited()
    lock.close()


def test_a_full_temporary_folder_is_not_left_for_another(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next trainer would look for the locks there, or here, and not find them."""
    SaverLock(STORE, RUN).close()
    monkeypatch.setattr(os, "open", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(Unavailable, match=f"cannot open or lock {temporary}.*No space left") as caught:
        SaverLock(STORE, RUN)
    assert "set TMPDIR" in caught.value.hint


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_named(code: int, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(code, os.strerror(code))))
    uses: list[Callable[[], object]] = [
        lambda: SaverLock(STORE, RUN), hold_folder, lambda: wait_for_orphans(STORE, RUN, timeout_s=30),
    ]  # fmt: skip
    before = len(os.listdir("/proc/self/fd"))
    for use in uses:
        with pytest.raises(Unavailable, match=f"lock {temporary}") as caught:
            use()
        assert "TMPDIR to a folder of a local disk" in caught.value.hint
    assert len(os.listdir("/proc/self/fd")) == before


def test_hosts_that_share_the_folder_do_not_see_each_others_locks(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer of one host would hide an orphan of the other. What is known of the run is common to both."""
    saver = _orphan(STORE)
    note_checkpoint(STORE, RUN)
    monkeypatch.setattr(locks, "_boot", lambda: "another host")
    there = SaverLock(STORE, RUN)
    assert noted_checkpoint(STORE, RUN) is not None
    monkeypatch.undo()
    monkeypatch.setenv("TMPDIR", str(temporary))
    assert not wait_for_orphans(STORE, RUN, timeout_s=0)
    os.close(saver)
    there.inherited()
    there.close()


def test_the_temporary_folder_is_one_that_can_be_written(tmp_path: Path) -> None:
    assert temporary_folder({"TMPDIR": "", "TEMP": str(tmp_path / "none"), "TMP": str(tmp_path)}) == tmp_path
    assert temporary_folder({}) == Path("/tmp")


@pytest.mark.parametrize("seen_by", ["a save", "a restore"])
def test_a_run_with_checkpoints_does_not_begin_in_an_empty_store(tmp_path: Path, temporary: Path, seen_by: str) -> None:
    """The volume is not mounted: its mount point is an empty folder."""
    store, away, model = tmp_path / "store", tmp_path / "away", nn.Linear(2, 2)
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model) is None, "a new run"
        checkpointer.prepare(model, None)
        checkpointer.save(model, None, 1)
    if seen_by == "a restore":
        shutil.rmtree(temporary / f"ckpt-{os.getuid()}")
        with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
            assert checkpointer.restore(model) is not None
    store.rename(away)
    store.mkdir()
    with Checkpointer(str(store), run="r", writer="thread") as checkpointer:
        begins: list[Callable[[], object]] = [
            lambda: checkpointer.restore(model),
            lambda: checkpointer.prepare(model, None),
            lambda: checkpointer.save(model, None, 2),
        ]
        for begin in begins:
            with pytest.raises(RunVanished, match="nothing of run 'r', which had checkpoints on this host") as caught:
                begin()
    note = Path(caught.value.hint.partition("remove ")[2].partition(";")[0])
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
