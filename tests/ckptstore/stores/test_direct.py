"""Large local files: what was written is what is there, whether or not the file system takes direct I/O."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.errors import CkptError, CorruptObject, StoreFull, StoreUnavailable
from ckptstore.format.documents import digest
from ckptstore.stores import ObjectReader, Store, direct, open_store
from tests.support.disks import small_file_system
from tests.support.stores import race

PACK = 64 << 10
SIZES = (0, 1, 4095, 4096, PACK - 1, PACK, PACK + 1, 5 * PACK, 5 * PACK + 4097)
CHUNK_SIZES = (1000, 4096, PACK, 3 * PACK + 17)
DIRECT = getattr(os, "O_DIRECT", 0)

Write = Callable[[int, Any, int], int]


@pytest.fixture(autouse=True)
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "PACK_BYTES", PACK)


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    with small_file_system(Path("/dev/shm") / f"ckpt-test-{os.getpid()}", "16m") as folder:
        yield folder
    folder.rmdir()


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & DIRECT)


def instead_of_writes(monkeypatch: pytest.MonkeyPatch, write: Callable[[Write, int, Any, int], int]) -> None:
    """Have `write` called for the first part of each write, with a real write as its first argument."""
    real = os.pwritev

    def write_first(fd: int, parts: list[memoryview], offset: int) -> int:
        return write(lambda fd, data, offset: real(fd, [data], offset), fd, parts[0], offset)

    monkeypatch.setattr(os, "pwritev", write_first)


def round_trip(store: Store, size: int, chunk: int, hint: int) -> None:
    data = random.Random(size).randbytes(size)
    with store.open_writer("run/shard", hint) as writer:
        for at in range(0, size, chunk):
            buffer = bytearray(data[at : at + chunk])
            writer.write(buffer)
            buffer[:] = bytes(len(buffer))
    assert store.get("run/shard") == data
    store.delete_many(["run/shard"])


def all_round_trips(store: Store) -> None:
    for size in SIZES:
        for chunk in CHUNK_SIZES:
            round_trip(store, size, chunk, hint=(0, size, 2 * size, 1)[chunk % 4])


def test_every_size_comes_back(store: Store, memory_folder: Path) -> None:
    all_round_trips(store)
    all_round_trips(open_store(str(memory_folder)))


def test_large_files_go_past_the_page_cache(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watch(write: Write, fd: int, data: Any, offset: int) -> int:
        seen.append((is_direct(fd), offset % 4096, len(data) % 4096))
        return write(fd, data, offset)

    instead_of_writes(monkeypatch, watch)
    round_trip(store, 3 * PACK + 5, 1000, 0)
    if not all(was_direct for was_direct, _, _ in seen):
        pytest.skip("this file system takes no direct I/O")
    assert set(seen) == {(True, 0, 0)}


def memory_of(data: bytes, spare: int = 0) -> memoryview:
    """A copy of data in memory of its own, so many bytes after the beginning of a page."""
    memory = mmap.mmap(-1, spare + len(data))
    memory[spare:] = data
    return memoryview(memory)[spare:]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is copied into a pack."""
    sizes: list[int] = []
    copy = direct.DirectFile._copy

    def watch(file: direct.DirectFile, data: Any) -> None:
        sizes.append(len(data))
        copy(file, data)

    monkeypatch.setattr(direct.DirectFile, "_copy", watch)
    return sizes


def test_memory_that_stays_is_written_from_where_it_lies(store: Store, copied: list[int]) -> None:
    data = random.Random(1).randbytes(9 * PACK + 17)
    memory, reused = memory_of(data[5000:], 5000 % 4096).toreadonly(), bytearray(data[:5000])
    with store.open_writer("run/shard", len(data)) as writer:
        writer.write(reused)
        reused[:] = bytes(5000)
        for at in range(0, len(memory), 3001):
            writer.write(memory[at : at + 3001])
    assert store.get("run/shard") == data
    assert sum(copied) < 5000 + 2 * 4096, "the bytes before the first whole block, and after the last one"


def write_in_parts(store: Store, chance: random.Random) -> None:
    """Parts of several kinds: some adjoin, some are aligned as the file is, and some are reused at once."""
    data = chance.randbytes(6 * PACK)
    memories = [memory_of(data), memory_of(data), memory_of(data, chance.choice((512, 1000, 4096)))]
    at = 0
    with store.open_writer("run/shard") as writer:
        while at < len(data):
            size = chance.choice((1, 17, 4096, 5000, PACK // 8, PACK, 2 * PACK + 1))
            part = memories[chance.choice((0, 0, 0, 1, 2))][at : at + size]
            stays = chance.random() < 0.8
            writer.write(part.toreadonly() if stays else part)
            at += len(part)
            if not stays:
                part[:] = bytes(len(part))
    assert store.get("run/shard") == data
    store.delete_many(["run/shard"])


def test_lent_and_copied_memory_in_any_order(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unaligned: list[int] = []

    def watch(write: Write, fd: int, data: Any, offset: int) -> int:
        address = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        unaligned.extend(number for number in (address, offset, len(data)) if number % 4096)
        return write(fd, data, offset)

    instead_of_writes(monkeypatch, watch)
    store, chance = open_store(str(memory_folder)), random.Random(5)
    for _ in range(60):
        write_in_parts(store, chance)
    assert not unaligned


def refuse_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for direct I/O gets an error."""
    control: Any = fcntl.fcntl

    def set_flags(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & DIRECT:
            raise OSError(errno.EINVAL, "injected")
        return int(control(fd, command, argument))

    monkeypatch.setattr(fcntl, "fcntl", set_flags)


_REFUSED = {"when asked": errno.EINVAL, "at the first": errno.EINVAL, "later": errno.EOPNOTSUPP}


@pytest.mark.parametrize("refuse", _REFUSED)
def test_file_systems_that_refuse(store: Store, monkeypatch: pytest.MonkeyPatch, refuse: str) -> None:
    seen = []

    def write_at(write: Write, fd: int, data: Any, offset: int) -> int:
        seen.append(is_direct(fd))
        if seen[-1] and (refuse == "at the first" or offset):
            raise OSError(_REFUSED[refuse], "injected")
        return write(fd, data, offset)

    if refuse == "when asked":
        refuse_direct(monkeypatch)
    instead_of_writes(monkeypatch, write_at)
    all_round_trips(store)
    assert False in seen


def test_short_writes_are_continued(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(7)

    def write_some(write: Write, fd: int, data: Any, offset: int) -> int:
        if is_direct(fd) and len(data) > 4096:
            count = chance.randrange(1, len(data) // 4096) * 4096
        else:
            count = chance.randrange(1, len(data) + 1)
        return write(fd, data[:count], offset)

    instead_of_writes(monkeypatch, write_some)
    all_round_trips(store)


def test_short_writes_of_several_parts_are_continued(memory_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, together, real = random.Random(11), [], os.pwritev

    def write_some(fd: int, parts: list[memoryview], offset: int) -> int:
        blocks = [part[at : at + 4096] for part in parts for at in range(0, len(part), 4096)]
        together.append(len(parts))
        return real(fd, blocks[: chance.randrange(1, min(len(blocks), 100) + 1)], offset)

    monkeypatch.setattr(os, "pwritev", write_some)
    store = open_store(str(memory_folder))
    for _ in range(30):
        write_in_parts(store, chance)
    assert max(together) > 1


@pytest.mark.parametrize(
    ("number", "error", "message", "after"),
    [
        (errno.EINVAL, StoreUnavailable, "injected", 0),  # direct I/O is not the reason
        *((errno.ENOSPC, StoreFull, "no space left", after) for after in (0, PACK, 2 * PACK)),
    ],
)
def test_a_failed_write_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int, error: type[CkptError], message: str, after: int
) -> None:
    def fail(write: Write, fd: int, data: Any, offset: int) -> int:
        if offset + len(data) > after:
            raise OSError(number, "injected")
        return write(fd, data, offset)

    instead_of_writes(monkeypatch, fail)
    with pytest.raises(error, match=message):
        round_trip(store, 3 * PACK, 1000, 3 * PACK)
    assert list(store.list("")) == []


def test_a_really_full_disk_leaves_nothing(memory_folder: Path) -> None:
    store = open_store(str(memory_folder))
    with pytest.raises(StoreFull, match="no space left"):
        round_trip(store, 17 << 20, 1 << 20, 17 << 20)
    assert list(store.list("")) == []
    round_trip(store, 12 << 20, 1 << 20, 12 << 20)


def test_too_much_that_was_reserved_is_given_back(store: Store, tmp_path: Path) -> None:
    with store.open_writer("run/shard", 64 << 20) as writer:
        writer.write(bytes(PACK + 1))
    status = (tmp_path / "store" / "run" / "shard").stat()
    assert status.st_size == PACK + 1
    assert status.st_blocks * 512 < 4 * PACK


def test_a_reservation_larger_than_the_disk_is_no_error(store: Store) -> None:
    round_trip(store, PACK, PACK, 1 << 60)


def test_giving_up_waits_for_what_is_being_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def hold(write: Write, fd: int, data: Any, offset: int) -> int:
        writing.set()
        assert go_on.wait(30)
        return write(fd, data, offset)

    instead_of_writes(monkeypatch, hold)

    def give_up() -> None:
        with store.open_writer("run/shard") as writer:
            writer.write(bytes(PACK))
            assert writing.wait(30)
            threading.Timer(0.05, go_on.set).start()
            raise KeyError

    with pytest.raises(KeyError):
        give_up()
    assert go_on.is_set(), "the descriptor was closed under a write"
    assert list(store.list("")) == []


def test_several_writers_at_once(store: Store) -> None:
    contents = [bytes([i]) * (3 * PACK + i) for i in range(6)]

    def write(number: int) -> None:
        with store.open_writer(f"run/{number}", 4 * PACK) as writer:
            for at in range(0, len(contents[number]), 5000):
                writer.write(contents[number][at : at + 5000])

    assert race(*(partial(write, i) for i in range(6))) == [None] * 6
    assert [store.get(f"run/{i}") for i in range(6)] == contents


RANGES = (
    (0, 1), (0, 4096), (1, 4096), (4095, 2), (4096, PACK), (5000, 3 * PACK + 17), (5 * PACK, 1), (0, 5 * PACK + 1),
)  # fmt: skip


def read_ranges(store: Store) -> None:
    """Read a file of 5 * PACK + 1 bytes."""
    data = random.Random(3).randbytes(5 * PACK + 1)
    store.put("run/shard", data)
    with store.open_reader("run/shard") as reader:
        for offset, size in RANGES:
            found = reader.read_once(offset, size)
            assert found == data[offset : offset + size]
            assert found.readonly
            assert np.frombuffer(found, np.uint8).ctypes.data % 4096 == offset % 4096
            ordinary = memoryview(bytearray(10))
            reader.read(17, ordinary)
            assert ordinary == data[17:27], "other reads of the same reader need no alignment"
        for offset, size in ((5 * PACK, 2), (5 * PACK + 4097, 1), (0, 6 * PACK)):
            with pytest.raises(CorruptObject, match="ends after"):
                reader.read_once(offset, size)


def test_ranges_that_are_read_once(store: Store, memory_folder: Path) -> None:
    read_ranges(store)
    read_ranges(open_store(str(memory_folder)))


@pytest.mark.parametrize("refuse", [*_REFUSED, "short reads"])
def test_file_systems_that_refuse_to_read(store: Store, monkeypatch: pytest.MonkeyPatch, refuse: str) -> None:
    read = os.preadv

    def read_at(fd: int, buffers: list[memoryview], offset: int) -> int:
        if refuse == "short reads":
            return read(fd, [buffers[0][:4096]], offset)
        if is_direct(fd):
            raise OSError(_REFUSED[refuse], "injected")
        return read(fd, buffers, offset)

    if refuse == "when asked":
        refuse_direct(monkeypatch)
    monkeypatch.setattr(os, "preadv", read_at)
    read_ranges(store)


def test_a_failed_read_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("run/shard", bytes(PACK))

    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "injected")

    with store.open_reader("run/shard") as reader:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(StoreUnavailable, match="injected"):
            reader.read_once(0, PACK)


def test_what_is_read_once_is_written_from_where_it_lies(store: Store, copied: list[int]) -> None:
    data = random.Random(4).randbytes(9 * PACK + 17)
    store.put("run/shard", data)
    with store.open_reader("run/shard") as reader, store.open_writer("run/copy", len(data)) as writer:
        for at in range(0, len(data), PACK + 1001):
            writer.write(reader.read_once(at, min(PACK + 1001, len(data) - at)))
    assert store.get("run/copy") == data
    assert sum(copied) <= 10 * 4096, "the blocks that two parts share"


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "WINDOW_BYTES", PACK + 1000)
    monkeypatch.setattr(direct, "_LEAST_DIRECT", 1)


def forgotten(store: Store, data: bytes) -> int:
    """The descriptor of a shard of this data that the page cache has dropped."""
    with store.open_writer("run/shard", len(data)) as writer:
        writer.write(data)
    fd = os.open(Path(store.url.removeprefix("file://")) / "run/shard", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def read_in_order(reader: ObjectReader, data: bytes, again: bool) -> None:
    """Each range from front to back, in reads of several sizes, one of them longer than a window."""
    for offset, size in RANGES:
        reader.expect(offset, size, again)
        at = offset
        for part in (1, 4096, 2 * PACK, 5 * PACK):
            found = [memoryview(bytearray(count)) for count in (min(part, offset + size - at) // 2, 0, 1)]
            if at + sum(map(len, found)) > offset + size:
                break
            reader.read_parts(at, found)
            assert b"".join(found) == data[at : at + sum(map(len, found))]
            at += sum(map(len, found))
        whole = memoryview(bytearray(size))
        assert reader.read_hashed(offset, whole) == digest(data[offset : offset + size])
        assert whole == data[offset : offset + size]


@pytest.mark.usefixtures("small_windows")
def test_what_nobody_reads_again_stays_out_of_the_page_cache(store: Store) -> None:
    data = random.Random(5).randbytes(5 * PACK + 1)
    fd = forgotten(store, data)
    try:
        with store.open_reader("run/shard") as reader:
            read_in_order(reader, data, again=False)
            if not is_direct_here(fd):
                pytest.skip("this file system takes no direct I/O")
            assert not direct.CachedPages(fd).have(0, len(data))
            read_in_order(reader, data, again=True)
            assert direct.CachedPages(fd).have(0, len(data))
            reads = direct.DirectReads(fd)
            assert not reads.expect(0, len(data)), "the page cache has them"
    finally:
        os.close(fd)


def is_direct_here(fd: int) -> bool:
    """Whether a file can be read past the page cache."""
    found = direct._set_direct(fd, True)
    direct._set_direct(fd, False)
    return found


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("refuse", [*_REFUSED, "short reads", "slow"])
def test_reads_past_the_page_cache_need_no_file_system_that_takes_them(
    store: Store, monkeypatch: pytest.MonkeyPatch, refuse: str
) -> None:
    data, read = random.Random(6).randbytes(5 * PACK + 1), os.preadv
    fd = forgotten(store, data)

    def read_at(fd: int, buffers: list[memoryview], offset: int) -> int:
        if refuse == "short reads":
            return read(fd, [buffers[0][:4096]], offset)
        if refuse in _REFUSED and is_direct(fd):
            raise OSError(_REFUSED[refuse], "injected")
        return read(fd, buffers, offset)

    if refuse == "when asked":
        refuse_direct(monkeypatch)
    if refuse == "slow":
        monkeypatch.setattr(direct, "_LEAST_RATE", 1e30)
        monkeypatch.setattr(direct, "_LATENCY_S", 0.0)
    monkeypatch.setattr(os, "preadv", read_at)
    try:
        with store.open_reader("run/shard") as reader:
            read_in_order(reader, data, again=False)
        reads = direct.DirectReads(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        reads.expect(0, PACK)
        reads.read(0, memoryview(bytearray(PACK)))
        assert refuse != "slow" or not reads.expect(PACK, PACK), "the page cache gets what a slow device sends"
    finally:
        os.close(fd)


@pytest.mark.usefixtures("small_windows")
def test_a_file_that_ends_early_or_fails_is_an_error_past_the_page_cache(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, read = random.Random(7).randbytes(3 * PACK + 5), os.preadv
    fd, failing = forgotten(store, data), False

    def read_at(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = read(fd, buffers, offset)
        if failing:
            raise OSError(errno.EIO, "injected")
        return count

    monkeypatch.setattr(os, "preadv", read_at)
    with store.open_reader("run/shard") as reader:
        for offset, size in ((0, 3 * PACK + 6), (3 * PACK + 4, 2)):
            reader.expect(offset, size, again=False)
            with pytest.raises(CorruptObject, match="ends after"):
                reader.read(offset, memoryview(bytearray(size)))
        into = memoryview(bytearray(PACK))
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        reader.expect(0, 3 * PACK, again=False)
        reader.read(0, into)
        failing = True
        with pytest.raises(StoreUnavailable, match="injected"):
            reader.read(2 * PACK, into)
        failing = False
        reader.read(0, into)
        assert into == data[:PACK], "a read that failed leaves nothing behind that a later one takes for the file"
