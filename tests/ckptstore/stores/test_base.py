"""The contract of stores/base.py, kept by every store alike; watched from outside where that is possible."""

from __future__ import annotations

import gc
import os
import threading
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import CorruptObject, ObjectMissing
from ckptstore.format.documents import digest
from ckptstore.stores import ObjectWriter, Store, open_store
from tests.conftest import every_store
from tests.support.checkpoints import keys
from tests.support.stores import race


def abandon(writer: ObjectWriter, data: bytes) -> None:
    """Write `data`, then leave the writer by an error."""

    def write_and_fail() -> None:
        with writer:
            writer.write(data)
            raise KeyError

    with pytest.raises(KeyError):
        write_and_fail()


@every_store
def test_put_replaces_whole_objects_and_put_if_absent_never(store: Store) -> None:
    store.put("run/a", b"first, and longer")
    store.put("run/a", b"second")
    assert (store.get("run/a"), store.size("run/a")) == (b"second", 6)
    store.put("run/empty", b"")
    assert store.get("run/empty") == b""
    store.put("run/view", memoryview(bytearray(b"a view")))
    assert store.get("run/view") == b"a view"
    assert not store.put_if_absent("run/a", b"third")
    assert store.get("run/a") == b"second"
    store.delete_many(["run/a"])
    assert store.put_if_absent("run/a", b"fourth")
    assert store.get("run/a") == b"fourth"


def test_what_is_on_this_host(tmp_path: Path) -> None:
    """The disk of the tests; not a kind of file system that is not known to be local, and not what is absent."""
    assert open_store(str(tmp_path)).on_this_host
    assert not open_store("/proc").on_this_host
    assert not open_store(str(tmp_path / "absent")).on_this_host
    assert not open_store("memory://r").on_this_host


@every_store
def test_put_if_absent_has_one_winner_among_threads(store: Store, request: pytest.FixtureRequest) -> None:
    # SeaweedFS backs off for a second when eight create at once: fewer contestants there, the same law.
    rounds, contestants = (6, 3) if "s3" in request.node.name else (20, 8)
    for number in range(rounds):
        key = f"run/{number}"
        results = race(*(partial(store.put_if_absent, key, b"%d" % i) for i in range(contestants)))
        winners = [index for index, result in enumerate(results) if result is True]
        assert len(winners) == 1, results
        assert results.count(False) == contestants - 1, results
        assert store.get(key) == b"%d" % winners[0]


@every_store
def test_readers_see_old_or_new_bytes_never_a_mixture(store: Store) -> None:
    values = {b"%d" % i * 500_000 for i in range(10)}
    store.put("run/a", min(values))
    written = threading.Event()

    def write() -> None:
        for value in sorted(values) * 3:
            store.put("run/a", value)
        written.set()

    def read() -> bool:
        whole = True
        while not written.is_set():
            whole = whole and store.get("run/a") in values
        return whole

    assert race(write, read, read) == [None, True, True]


@every_store
def test_ranged_reads(store: Store) -> None:
    store.put("run/a", b"0123456789")

    def read(offset: int, size: int) -> bytes:
        buffer = bytearray(b"." * size)
        count = store.read_into("run/a", offset, memoryview(buffer))
        assert buffer[count:] == b"." * (size - count), "wrote behind what it says it read"
        return bytes(buffer[:count])

    assert (read(0, 10), read(3, 4), read(8, 5), read(10, 5)) == (b"0123456789", b"3456", b"89", b"")
    assert (read(1000, 5), read(4, 0)) == (b"", b"")
    buffer = memoryview(bytearray(4))
    store.get_range("run/a", 6, buffer)
    assert bytes(buffer) == b"6789"
    with pytest.raises(CorruptObject, match="ends after 10 bytes, 11 were expected"):
        store.get_range("run/a", 7, buffer)


@every_store
def test_reads_are_hashed(store: Store) -> None:
    data = bytes(range(256)) * 40
    store.put("run/a", data)
    buffer = memoryview(bytearray(9_000))
    with store.open_reader("run/a") as reader:
        assert reader.read_hashed(1_000, buffer) == digest(data[1_000:10_000])
        assert buffer == data[1_000:10_000]
        with pytest.raises(CorruptObject, match="ends after 10240 bytes"):
            reader.read_hashed(1_241, buffer)


@every_store
def test_lists_are_ordered_and_stop_at_the_prefix(store: Store) -> None:
    assert keys(store) == keys(store, "run/") == []
    assert list(store.list_folders("")) == []
    for key in ("run/b/2", "run/a/1", "run/b/10", "run-2/x", "run/top", "r/y"):
        store.put(key, key.encode())
    assert keys(store, "run/") == ["run/a/1", "run/b/10", "run/b/2", "run/top"]
    assert (keys(store, "run/b/"), keys(store, "run/b/1")) == (["run/b/10", "run/b/2"], ["run/b/10"])
    assert keys(store, "run/t") == ["run/top"]
    assert keys(store, "nothing/") == keys(store, "run/c") == keys(store, "nothing/at") == []
    assert keys(store) == ["r/y", "run-2/x", "run/a/1", "run/b/10", "run/b/2", "run/top"]
    assert list(store.list_folders("")) == ["r", "run", "run-2"]
    assert (list(store.list_folders("run/")), list(store.list_folders("nothing/"))) == (["a", "b"], [])
    store.put("sizes/b", b"")
    store.put("sizes/a", b"12345")
    first, second = store.list("sizes/")
    assert (first.bytes, second.bytes) == (5, 0)
    assert abs(system_clock() - first.modified_at) < 60


@every_store
def test_deleting_is_idempotent_and_missing_objects_are_named(store: Store) -> None:
    for key in ("run/a", "run/b", "run/c"):
        store.put(key, b"x")
    store.delete_many(iter(["run/a", "run/never", "run/b"]))
    store.delete_many(["run/a"])
    store.delete_many([])
    assert keys(store) == ["run/c"]
    ranged = (partial(read, offset=0, buffer=memoryview(bytearray(1))) for read in (store.read_into, store.get_range))
    for call in (store.get, store.size, *ranged):
        for key in ("run/a", "run/missing"):
            with pytest.raises(ObjectMissing, match=key):
                call(key)


@every_store
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (1, 0, 2), (5 << 20, 1)])
def test_a_writer_makes_one_object_of_its_parts(store: Store, sizes: tuple[int, ...]) -> None:
    parts = [bytes([65 + i]) * size for i, size in enumerate(sizes)]
    with store.open_writer("run/a", sum(sizes)) as writer:
        for part in parts:
            buffer = bytearray(part)
            writer.write(memoryview(buffer))
            buffer[:] = b"!" * len(buffer)  # the caller may reuse its buffer at once
    assert (store.get("run/a"), keys(store)) == (b"".join(parts), ["run/a"])


@every_store
def test_an_object_is_seen_whole_or_not_at_all(store: Store) -> None:
    abandon(store.open_writer("run/a", 100), b"some of it")
    assert keys(store) == []
    with store.open_writer("run/a", 100) as writer:
        writer.write(b"first")
    abandon(store.open_replacement("run/a", 100), b"some of it")
    assert store.get("run/a") == b"first"
    with store.open_replacement("run/a", 6) as writer:
        writer.write(b"sec")
        assert store.get("run/a") == b"first"
        writer.write(b"ond")
    assert store.get("run/a") == b"second"
    with store.open_replacement("run/b", 1) as writer:
        writer.write(b"b")
    assert keys(store) == ["run/a", "run/b"]


def test_local_files_being_written_are_not_objects(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "run").mkdir()
    fresh, stale = tmp_path / "run" / ".tmp-fresh", tmp_path / "run" / ".tmp-stale"
    fresh.write_bytes(b"")
    stale.write_bytes(b"")
    os.utime(stale, (0, 0))
    assert keys(store) == []
    assert fresh.exists()
    assert not stale.exists(), "a killed process's file is removed after a day"


def test_local_urls_lead_back_to_the_same_folder(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "a folder with ü and %20"))
    store.put("run/a", b"x")
    assert open_store(store.url).get("run/a") == b"x"


def test_local_folders_may_vanish_while_objects_are_made(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))

    def come_and_go(name: str) -> bool:
        for _ in range(100):
            store.put(f"run/leases/{name}", b"x")
            store.delete_many([f"run/leases/{name}"])
        return True

    assert (race(*(partial(come_and_go, str(i)) for i in range(4))), keys(store)) == ([True] * 4, [])


def test_memory_is_listed_while_others_write_and_delete() -> None:
    count, store = 4000, open_store(f"memory://{uuid.uuid4().hex}")
    for i in range(count):
        store.put(f"runs/{i:04}/stays", b"x")

    def write(thread: int) -> None:
        for i in range(200):
            key = f"runs/{thread}/{i}"
            store.put(key, b"x")
            store.delete_many([key])

    def look() -> None:
        for _ in range(5):
            assert sum(info.key.endswith("stays") for info in store.list("runs/")) == count
            assert set(store.list_folders("runs/")) >= {f"{i:04}" for i in range(count)}

    def let_others_run(*_: object) -> None:
        time.sleep(0)

    # Where Python collects garbage, in the middle of what looks like one step, threads may change places.
    gc.callbacks.append(let_others_run)
    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    try:
        assert race(partial(write, 1000), look, partial(write, 2000), look) == [None] * 4
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(let_others_run)
        store.delete_many([info.key for info in store.list("")])  # memory is shared by all tests
