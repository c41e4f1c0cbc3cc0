"""What goes wrong in the outside world arrives as a typed error that names the object, and loses nothing."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.commits.catalog import latest
from ckptstore.errors import CkptError, InvalidRequest, StoreFull, StoreReadOnly, StoreUnavailable, StoreUnsafe
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store, local, open_store
from ckptstore.stores.checks import check_store, creates_once
from ckptstore.stores.remote_create import RemoteCreateStore
from tests.support.checkpoints import write_checkpoint
from tests.support.disks import small_file_system
from tests.support.stores import race


def write_many(store: Store, steps: Iterable[int]) -> None:
    for step in steps:
        write_checkpoint(store, step=step)


def test_a_full_disk_is_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as folder:
        store = open_store(str(folder))
        first = write_checkpoint(store, step=1)
        with pytest.raises(StoreFull, match="no space left") as caught:
            write_many(store, range(2, 10))
        assert "prune" in caught.value.hint
        for checkpoint in (first, latest(Run(store, "gpt"))):
            assert verify(StoreSource(store), checkpoint).ok
        with pytest.raises(StoreFull):
            store.put("gpt/leases/x", bytes(8 << 20))
        assert not list(store.list("gpt/leases/"))
        assert not list(folder.rglob(".tmp-*")), "half a file was left behind"


def test_a_read_only_folder(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as folder:
        store = open_store(str(folder))
        checkpoint = write_checkpoint(store)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        for write in (
            lambda: store.put("gpt/a", b"x"),
            lambda: store.put_if_absent("gpt/a", b"x"),
            lambda: store.open_writer("gpt/new/a"),
            lambda: store.delete_many([info.key for info in store.list("gpt/")]),
        ):
            with pytest.raises(StoreReadOnly):
                write()
        assert verify(StoreSource(store), checkpoint).ok, "reading goes on"


@pytest.mark.parametrize("url", ["nonsense://x/y", "file://", "file:/folder", "://", ""])
def test_unknown_schemes_and_a_file_in_the_place_of_the_root(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        open_store(url)
    assert caught.value.hint
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CkptError, match="file"):
        open_store(str(tmp_path / "file")).put("gpt/a", b"x")


def test_a_folder_that_vanished_is_neither_empty_nor_created_again(tmp_path: Path) -> None:
    """An unmounted volume: what is written must not go to the disk below it, and what is missing is not gone."""
    folder, elsewhere = tmp_path / "store", tmp_path / "elsewhere"
    new = open_store(str(folder))
    assert list(new.list("")) == []
    checkpoint, old = write_checkpoint(new), open_store(str(folder))
    folder.rename(elsewhere)
    calls: list[Callable[[Store], object]] = [
        lambda store: store.put("gpt/a", b"x"), lambda store: store.put_if_absent("gpt/a", b"x"),
        lambda store: store.open_writer("gpt/new/a"), lambda store: store.get("gpt/a"),
        lambda store: store.size("gpt/a"), lambda store: list(store.list("gpt/")),
        lambda store: list(store.list_folders("")), lambda store: store.delete_many(["gpt/a"]),
        lambda store: latest(Run(store, "gpt")),
    ]  # fmt: skip
    for store in (new, old):
        for call in calls:
            with pytest.raises(StoreUnavailable, match=f"there is no folder {folder}") as caught:
                call(store)
            assert "volume" in caught.value.hint
    assert not folder.exists()
    elsewhere.rename(folder)
    for store in (new, old):
        assert latest(Run(store, "gpt")).id == checkpoint.id
    store.put("gpt/a", b"x")


def test_a_folder_without_permission(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; test_a_read_only_folder covers the error")
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StoreReadOnly, match="Permission denied"):
            open_store(str(tmp_path)).put("gpt/a", b"x")
    finally:
        tmp_path.chmod(0o700)


def test_a_name_counts_only_when_its_folder_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that made the name failed to sync its folder; the next one finds it."""
    store, synced, errors = open_store(str(tmp_path)), list[Path](), [OSError(errno.EIO, "I/O error")]
    store.put("commits/1", b"")

    def sync(folder: Path) -> None:
        synced.append(folder)
        if errors:
            raise errors.pop()

    monkeypatch.setattr(local, "sync_folder", sync)
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("commits/2", b"mine")
    assert not store.put_if_absent("commits/2", b"mine")
    assert synced == [tmp_path / "commits"] * 2


def test_a_listing_finds_the_successor_of_what_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, scandir, versions = open_store(str(tmp_path)), os.scandir, iter((2, 3, 4))
    store.put("run/labels/1", b"old")

    def replaced(folder: Path) -> list[os.DirEntry[str]]:
        entries = list(scandir(folder))
        if (version := next(versions, None)) is not None:
            store.put(f"run/labels/{version}", b"new")
            (tmp_path / "run/labels" / str(version - 1)).unlink()
        return entries

    monkeypatch.setattr(os, "scandir", replaced)
    assert [info.key for info in store.list("run/labels/")] == ["run/labels/4"]


def test_folders_of_another_rank_are_made_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has created them, and not synced their names: a receipt in them would not survive a power cut."""
    store, synced, sync = open_store(str(tmp_path / "store")), list[str](), local.sync_folder
    (tmp_path / "store" / "gpt" / "attempts" / "1").mkdir(parents=True)

    def note(folder: Path) -> None:
        synced.append(folder.name)
        sync(folder)

    monkeypatch.setattr(local, "sync_folder", note)
    for name in "ab":
        store.put(f"gpt/attempts/1/{name}", b"")
    assert synced == [tmp_path.name, "store", "gpt", "attempts", "1", "1"]


def _mounted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, place: str = "a folder") -> Store:
    """A store below a mount of this kind, as the kernel lists it; the device is another one, as on btrfs."""
    below = str(tmp_path / place).replace(" ", r"\040")
    lines = ["1 0 8:1 / / rw - ext4 /dev/a rw", f"2 1 0:99 / {below} rw shared:1 - {kind} x rw"]
    (tmp_path / "mounts").write_text("\n".join(lines))
    monkeypatch.setattr(local, "_MOUNTS", tmp_path / "mounts")
    (tmp_path / "a folder" / "store").mkdir(parents=True, exist_ok=True)
    return open_store(str(tmp_path / "a folder" / "store"))


@pytest.mark.parametrize(
    ("kind", "one_winner", "lags", "on_this_host"),
    [
        ("btrfs", True, False, True), ("fuseblk", True, False, True), ("nfs4", True, True, False),
        ("lustre", True, False, False), ("cifs", None, True, False), ("fuse.gcsfuse", None, True, False),
        ("fuse.seaweedfs", False, True, False), ("unheard-of", None, False, False),
    ],
)  # fmt: skip
def test_what_a_file_system_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, one_winner: bool | None, lags: bool, on_this_host: bool
) -> None:
    store = _mounted(monkeypatch, tmp_path, kind)
    assert (store.one_winner, store.listing_lag_s > 60, store.on_this_host) == (one_winner, lags, on_this_host)
    assert _mounted(monkeypatch, tmp_path, kind, "a folde").on_this_host  # a name that another begins with


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_mount_without_hard_links_is_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    store = RemoteCreateStore(_mounted(monkeypatch, tmp_path, "fuse.gcsfuse"), None)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        with pytest.raises(StoreUnsafe, match=r"\(fuse.gcsfuse\) refuses hard links"):
            store.put_if_absent("gpt/commits/00000001.json", b"x")
    assert list(store.list("")) == []


@pytest.mark.parametrize("kind", ["fuse.unheard-of", "fuse.seaweedfs"])
def test_a_mount_with_emulated_links_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store = _mounted(monkeypatch, tmp_path, kind)
    if kind == "fuse.unheard-of":
        monkeypatch.setattr(os, "link", lambda source, target: Path(target).write_bytes(Path(source).read_bytes()))
        assert all(race(*[lambda: store.put_if_absent("gpt/a", b"x")] * 2)), "if it refuses now, this test is none"
    assert not creates_once(store, system_clock)
    with pytest.raises(StoreUnsafe, match="overwrites"):
        check_store(store, system_clock)


@pytest.mark.parametrize("below", ["", "ckpts"])
def test_nothing_is_written_below_the_mount_point_of_a_volume_that_is_not_mounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    fstab, volume = tmp_path / "fstab", tmp_path / "volume"
    volume.mkdir()
    fstab.write_text(f"# comment\nUUID=1 / ext4 defaults 0 1\nserver:/x {volume} nfs noauto 0 0\nnone none swap\n")
    monkeypatch.setattr("ckptstore.stores.local._FSTAB", fstab)
    store = open_store(str(volume / below))
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="is not mounted"):
            store.put("r/a", b"x")
    assert not [*volume.iterdir()]
    open_store(str(tmp_path / "beside")).put("r/a", b"x")
    fstab.write_text("")
    store.put("r/a", b"x")
