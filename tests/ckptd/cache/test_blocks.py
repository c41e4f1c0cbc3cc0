from __future__ import annotations

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from ckptd.cache import BLOCK_BYTES, BlockCache, open_folder
from ckptd.cache.extents import GRAIN_BYTES, Extent
from ckptd.metrics import Metrics
from ckptstore.errors import CorruptObject, StoreUnavailable
from ckptstore.names import Attempt, RunKeys
from ckptstore.stores import open_store
from tests.support.checkpoints import flip
from tests.support.disks import small_file_system
from tests.support.stores import CountingStore
from tests.support.waiting import wait_until

_ATTEMPT = Attempt(7, "01HF7YAT00ABCDEFGHJKMNPQRS")
_KEY = RunKeys("gpt").shard(_ATTEMPT, "shard-00000.ckpt")
_SIZE = 3 * BLOCK_BYTES + 12_345
_ROOMY = 1 << 30


@dataclass
class Cached:
    """A cache over a store with one shard."""

    blocks: BlockCache
    store: CountingStore
    metrics: Metrics
    data: bytes
    folder: Path

    def read(self, offset: int, count: int) -> bytes:
        """All bytes of a range, as a reader puts them together."""
        found = bytearray()
        while len(found) < count:
            found += self.blocks.read(_KEY, len(self.data), offset + len(found), count - len(found))
        return bytes(found)

    def check(self, offset: int, count: int) -> None:
        assert self.read(offset, count) == self.data[offset : offset + count]

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "extents").iterdir())

    @property
    def hits(self) -> float:
        """How many did not have to read the store."""
        return self.metrics.registry.get_sample_value("ckptd_cache_hits_total") or 0.0


Opener = Callable[..., Cached]


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Opener]:
    """Opens caches over one store, by default in one folder; the one before is closed first."""
    inner, data = open_store(str(tmp_path / "store")), Random(5).randbytes(_SIZE)
    inner.put(_KEY, data)
    opened: list[BlockCache] = []

    def opening(limit: int = _ROOMY, folder: Path = tmp_path / "cache", reads: int = 4, url: str = "") -> Cached:
        while opened:
            opened.pop().close()
        store, metrics = CountingStore(inner), Metrics()
        blocks = BlockCache(store, open_folder(folder, url or store.url), limit, reads, metrics)
        opened.append(blocks)
        return Cached(blocks, store, metrics, data, folder)

    yield opening
    while opened:
        opened.pop().close()


@contextmanager
def held_reads(cache: Cached) -> Iterator[None]:
    """Within the block no read of the store begins; they go on at its end."""
    gate = threading.Event()
    cache.store.before_read = gate.wait
    try:
        yield
    finally:
        gate.set()


def at_once(cache: Cached, ranges: list[tuple[int, int]]) -> list[bytes | BaseException]:
    """What readers of these ranges got who all came while the first one was being read."""
    with ThreadPoolExecutor(len(ranges)) as pool:
        with held_reads(cache):
            futures = [pool.submit(cache.read, *wanted) for wanted in ranges]
            wait_until(lambda: cache.hits == len(ranges) - 1, "waiting of all but one reader")
        return [future.exception() or future.result() for future in futures]


def test_many_readers_of_missing_bytes_cost_one_read(cached: Opener) -> None:
    cache, ranges = cached(), [(5000 + 100 * i, 1_000_000) for i in range(8)]
    assert at_once(cache, [(0, 2 * 10**6), *ranges]) == [cache.data[:2_000_000]] + [
        cache.data[offset : offset + count] for offset, count in ranges
    ]
    assert len(cache.store.reads) == 1
    assert cache.store.read_bytes < 2_000_000 + 2 * GRAIN_BYTES


def test_an_error_reaches_all_who_wait_and_is_not_kept(cached: Opener) -> None:
    cache = cached()

    def fail() -> None:
        wait_until(lambda: cache.hits == 4, "waiting of the others")
        raise StoreUnavailable("injected")

    cache.store.before_read = fail
    with ThreadPoolExecutor(5) as pool:
        futures = [pool.submit(cache.read, 0, 1000) for _ in range(5)]
        assert [type(future.exception()) for future in futures] == [StoreUnavailable] * 5
    assert (len(cache.store.reads), cache.files) == (1, [])
    cache.store.before_read = lambda: None
    cache.check(0, 1000)
    assert len(cache.store.reads) == 2


def test_an_object_that_ends_early_is_not_kept(cached: Opener, tmp_path: Path) -> None:
    cache = cached()
    os.truncate(tmp_path / "store" / _KEY, BLOCK_BYTES + 10)
    cache.check(0, BLOCK_BYTES)
    for _ in range(2):
        with pytest.raises(CorruptObject):
            cache.read(BLOCK_BYTES, 1000)
    assert len(cache.files) == 1
    (tmp_path / "store" / _KEY).write_bytes(cache.data)
    cache.check(0, _SIZE)


def test_nothing_is_read_twice_nor_beyond_the_end(cached: Opener) -> None:
    cache, random = cached(), Random(1)
    for _ in range(40):
        offset = random.randrange(_SIZE)
        cache.check(offset, random.randint(1, min(_SIZE - offset, 2 * BLOCK_BYTES)))
    cache.check(0, _SIZE)
    assert cache.store.read_bytes == _SIZE
    before = len(cache.store.reads)
    cache.check(0, _SIZE)
    assert len(cache.store.reads) == before


def test_a_small_read_fetches_little(cached: Opener) -> None:
    cache = cached()
    cache.check(BLOCK_BYTES - 10, 20)
    cache.check(_SIZE - 1, 1)
    assert cache.store.read_bytes <= 3 * GRAIN_BYTES


def test_the_least_recently_used_goes_first(cached: Opener) -> None:
    cache = cached(limit=2 * BLOCK_BYTES)
    for block in (0, 1, 0, 2):
        cache.check(block * BLOCK_BYTES, BLOCK_BYTES)
    assert len(cache.files) == 2
    assert sum(path.stat().st_size for path in cache.files) <= 2 * (BLOCK_BYTES + 16)
    cache.store.reads.clear()
    cache.check(0, BLOCK_BYTES)
    cache.check(2 * BLOCK_BYTES, BLOCK_BYTES)
    assert cache.store.reads == []
    cache.check(BLOCK_BYTES, BLOCK_BYTES)
    assert cache.store.reads == [(_KEY, BLOCK_BYTES, BLOCK_BYTES)]
    assert cache.metrics.registry.get_sample_value("ckptd_cache_evictions_total") == 2
    assert cache.metrics.registry.get_sample_value("ckptd_cache_bytes") == 2 * BLOCK_BYTES


def test_what_is_larger_than_the_limit_is_served_and_not_kept(cached: Opener) -> None:
    cache = cached(limit=1 << 20)
    cache.check(100, 2 << 20)
    assert cache.files == []


def test_the_number_of_small_files_is_limited(cached: Opener) -> None:
    cache = cached(limit=1 << 20)
    for index in range(40):
        cache.check(2 * index * GRAIN_BYTES, GRAIN_BYTES)
    assert len(cache.files) == 16


def _swap(path: Path, other: Path) -> None:
    kept = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


_DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a bit of the bytes": lambda path, _: flip(path, 1234),
    "a bit of the checksum": lambda path, _: flip(path, -1),
    "cut": lambda path, _: os.truncate(path, 4096),
    "empty": lambda path, _: os.truncate(path, 0),
    "zeros": lambda path, _: path.write_bytes(bytes(path.stat().st_size)),
    "another file's bytes": _swap,
    "gone": lambda path, _: path.unlink(),
    "a folder": lambda path, _: _make_folder(path),
}


@pytest.mark.parametrize("damage", _DAMAGES)
@pytest.mark.parametrize("restarted", [False, True])
def test_damage_in_the_folder_is_never_served(cached: Opener, damage: str, restarted: bool) -> None:
    cache = cached()
    cache.check(0, 2 * BLOCK_BYTES)
    one, other = cache.files
    _DAMAGES[damage](one, other)
    cache = cached() if restarted else cache
    cache.store.reads.clear()
    cache.check(0, 2 * BLOCK_BYTES)
    assert cache.store.reads, "nothing was damaged"
    if damage == "a folder":
        return  # nothing of ours: it stays in the way, and the bytes come from the store
    cache.store.reads.clear()
    cache.check(0, 2 * BLOCK_BYTES)
    assert cache.store.reads == []


def test_damage_is_logged(cached: Opener, caplog: pytest.LogCaptureFixture) -> None:
    cache = cached()
    cache.check(0, 1000)
    flip(cache.files[0], 0)
    with caplog.at_level(logging.WARNING):
        cache.check(0, 1000)
    assert [record.message for record in caplog.records if "damaged" in record.message]


def test_a_restart_is_warm_and_keeps_to_its_limit(cached: Opener) -> None:
    cached().check(0, _SIZE)
    warm = cached()
    warm.check(0, _SIZE)
    assert warm.store.reads == []
    small = cached(limit=BLOCK_BYTES)
    assert len(small.files) == 1
    small.check(0, _SIZE)


def test_leftovers_are_removed_at_the_start(cached: Opener) -> None:
    cache = cached()
    cache.check(0, _SIZE)
    good, folder = cache.files, cache.folder / "extents"
    assert Extent.parse(good[0].name) is not None
    (folder / ".tmp-01HF7YAT00ABCDEFGHJKMNPQRS").write_bytes(b"half")
    (folder / "something else").write_bytes(b"x")
    for wrong in (Extent(_KEY, 0, 4096), Extent(_KEY, 4096, BLOCK_BYTES), Extent(_KEY, 0, 0)):
        (folder / wrong.file_name).write_bytes(bytes(wrong.bytes + 16))
    (folder / Extent(_KEY.replace("00000.", "00001."), 0, 99).file_name).write_bytes(b"too short")
    cache = cached()
    assert len(cache.files) == len(good)
    cache.check(0, _SIZE)


def test_a_folder_of_another_store_is_emptied(cached: Opener) -> None:
    cached().check(0, 1000)
    assert cached(url="s3://elsewhere").files == []


def test_two_caches_do_not_share_a_folder(cached: Opener, caplog: pytest.LogCaptureFixture) -> None:
    first = cached()
    first.check(0, 1000)
    with caplog.at_level(logging.WARNING):
        assert open_folder(first.folder, first.store.url) is None
    assert "another daemon" in caplog.text
    assert len(first.files) == 1


def test_without_a_folder_readers_at_once_share_a_read(cached: Opener, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = cached(folder=tmp_path / "file")
    assert (at_once(cache, [(0, 1000)] * 5), len(cache.store.reads)) == ([cache.data[:1000]] * 5, 1)
    cache.check(0, 1000)
    assert len(cache.store.reads) == 2


def test_reads_go_on_with_a_full_disk(cached: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_file_system(tmp_path / "small", "5m") as disk:
        cache = cached(folder=disk / "cache")
        with caplog.at_level(logging.WARNING):
            cache.check(0, _SIZE)
            cache.check(0, _SIZE)
        assert len([record for record in caplog.records if "cannot write" in record.message]) == 1
        assert [Extent.parse(path.name) is None for path in cache.files] == [False] * len(cache.files)
        subprocess.run(["mount", "-o", "remount,size=100m", str(disk)], check=True)
        cache.check(0, _SIZE)
        cache.store.reads.clear()
        cache.check(0, _SIZE)
        assert cache.store.reads == []


def test_reads_of_the_store_are_limited(cached: Opener) -> None:
    cache = cached(reads=2)
    cache.store.before_read = threading.Barrier(2, timeout=60).wait
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda block: cache.check(block * BLOCK_BYTES, 1000), range(4)))
    assert cache.store.most_at_a_time == 2


def test_what_is_dropped_is_read_again_and_others_stay(cached: Opener) -> None:
    cache = cached()
    cache.check(0, 1000)
    assert cache.blocks.owners() == {("gpt", _ATTEMPT)}
    cache.blocks.drop("gpt", Attempt(8, _ATTEMPT.ulid))
    cache.blocks.drop("gp", _ATTEMPT)
    assert len(cache.files) == 1
    cache.blocks.drop("gpt", _ATTEMPT)
    assert (cache.files, cache.blocks.owners()) == ([], set())
    cache.check(0, 1000)
    assert len(cache.store.reads) == 2


def test_a_read_past_the_cache_mends_it(cached: Opener, tmp_path: Path) -> None:
    cache, path = cached(), tmp_path / "store" / _KEY
    flip(path, 500)
    assert cache.read(0, 1000) != cache.data[:1000]
    path.write_bytes(cache.data)
    assert cache.read(0, 1000) != cache.data[:1000]
    assert cache.blocks.read_past(_KEY, 400, 200) == cache.data[400:600]
    cache.check(0, 1000)


def test_a_read_past_the_cache_leaves_a_read_under_way_alone(cached: Opener) -> None:
    cache, gate = cached(), threading.Event()
    cache.store.before_read = lambda: len(cache.store.reads) > 1 or gate.wait()
    with ThreadPoolExecutor(2) as pool:
        try:
            readers = [pool.submit(cache.read, 0, 1000)]
            wait_until(lambda: cache.store.reads, "the first read")
            assert cache.blocks.read_past(_KEY, 0, 1000) == cache.data[:1000]
            readers.append(pool.submit(cache.read, 0, 1000))
            wait_until(lambda: cache.hits or len(cache.store.reads) > 2, "the second reader")
        finally:
            gate.set()
        assert [reader.result() for reader in readers] == [cache.data[:1000]] * 2
    assert len(cache.store.reads) == 2
