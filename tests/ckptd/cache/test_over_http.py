"""N ranks that read a checkpoint through the daemon cost the store one read of it."""

from __future__ import annotations

import re
import shutil
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest

from ckptd.app import create_app
from ckptd.cache import BLOCK_BYTES
from ckptd.settings import Settings
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.records import Policy
from ckptstore.names import RunKeys
from ckptstore.retention.pruning import Prune
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import Daemon, running_daemon
from tests.support.stores import CountingStore, serving
from tests.support.waiting import wait_until

_SHARD = "shard-00000.ckpt"
_SIZE = (9 << 20) + 777
_DATA = Random(3).randbytes(_SIZE)


def _write(store: Store, step: int = 1) -> Checkpoint:
    """A checkpoint whose shard is replaced by known bytes: neither daemon nor cache look into it."""
    checkpoint = write_checkpoint(store, step=step)
    store.put(RunKeys("gpt").shard(checkpoint.attempt, _SHARD), _DATA)
    return checkpoint


def _path(checkpoint: Checkpoint) -> str:
    return f"/v1/checkpoints/{checkpoint.id}/shards/{_SHARD}"


def _ranges(offset: int, step: int) -> list[tuple[int, int]]:
    """Cuts the shard into ranges of `step` bytes, the first of `offset`."""
    starts = [0, *range(offset, _SIZE, step)]
    return [(start, end) for start, end in zip(starts, [*starts[1:], _SIZE], strict=True) if start < end]


def _read(url: str, ranges: Sequence[tuple[int, int]], headers: dict[str, str] | None = None) -> None:
    with httpx.Client(timeout=60) as http:
        for start, end in ranges:
            answer = http.get(url, headers={"Range": f"bytes={start}-{end - 1}", **(headers or {})})
            assert (answer.status_code, answer.content) == (206, _DATA[start:end])


@dataclass
class Counted:
    url: str
    store: CountingStore
    app_metrics: str

    def metric(self, name: str) -> float:
        lines = httpx.get(self.app_metrics).text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"ckptd_cache_{name} "))

    @property
    def shard_bytes(self) -> int:
        return sum(count for key, _, count in self.store.reads if key.endswith(".ckpt"))


@pytest.fixture
def counted(store: Store, tmp_path: Path) -> Iterator[Counted]:
    """A daemon that serves a shard; its URL is the shard's."""
    checkpoint, counting = _write(store), CountingStore(store)
    index, cache = f"sqlite:///{tmp_path / 'index.db'}", str(tmp_path / "cache")
    settings = Settings(store=store.url, auth="off", db=index, cache=cache, poll_seconds=0.1)
    with serving(create_app(settings, counting)) as url:
        wait_until(lambda: httpx.get(f"{url}/readyz").status_code == 200, "readiness")
        yield Counted(url + _path(checkpoint), counting, f"{url}/metrics")


@pytest.mark.parametrize("store", ["local", "s3"], indirect=True)
@pytest.mark.parametrize(
    "readers", [[(1_000_000, 1_500_001)] * 4, [(100_000 * i + 1, 700_001 + 400_000 * i) for i in range(4)]],
    ids=["the same ranges", "each other ranges"],
)  # fmt: skip
def test_four_readers_of_a_checkpoint_cost_one_read(counted: Counted, readers: list[tuple[int, int]]) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda cut: _read(counted.url, _ranges(*cut)), readers))
    assert counted.shard_bytes == _SIZE
    _read(counted.url, _ranges(5, 999_999))
    assert counted.shard_bytes == _SIZE, "warm"
    assert (counted.metric("store_bytes_total"), counted.metric("served_bytes_total")) == (_SIZE, 5 * _SIZE)
    assert counted.metric("bytes") == _SIZE
    assert counted.metric("misses_total") == len([key for key, _, _ in counted.store.reads if key.endswith(".ckpt")])


def test_four_readers_of_a_part_cost_one_read_of_the_part(counted: Counted) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: _read(counted.url, [(3_000_001, 3_500_002), (5_000_000, 5_300_000)]), range(4)))
    assert counted.shard_bytes <= 1.05 * 800_001


def test_a_reader_that_goes_away_does_not_fail_others(counted: Counted) -> None:
    gate = threading.Event()

    def hold() -> None:
        if len(counted.store.reads) > 1:
            gate.wait()

    counted.store.before_read = hold
    second = (BLOCK_BYTES, 2 * BLOCK_BYTES)
    with ThreadPoolExecutor(3) as pool:
        try:
            with _reader_who_hangs_up(counted.url):
                wait_until(lambda: len(counted.store.reads) == 2, "the second read of the one who goes away")
                others = [pool.submit(_read, counted.url, [second]) for _ in range(3)]
                wait_until(lambda: counted.metric("hits_total") == 3, "waiting of the others")
            ended = (
                'ckptd_http_requests_total{method="GET",route="/v1/checkpoints/{id}/shards/{name}",status="206"} 1.0'
            )
            wait_until(lambda: ended in httpx.get(counted.app_metrics).text, "noticing")
        finally:
            gate.set()
        for other in others:
            other.result()
    assert len(counted.store.reads) == 2


@contextmanager
def _reader_who_hangs_up(url: str) -> Iterator[None]:
    """Asks for two blocks, and is gone at the end of the `with` block."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: localhost\r\nRange: bytes=0-{2 * BLOCK_BYTES - 1}\r\n\r\n".encode()
        )
        yield


def test_a_reader_in_doubt_is_answered_by_the_store(counted: Counted, tmp_path: Path) -> None:
    key = next(tmp_path.glob(f"store/gpt/attempts/*/{_SHARD}"))
    key.write_bytes(bytes(_SIZE))
    assert httpx.get(counted.url).content == bytes(_SIZE)
    key.write_bytes(_DATA)
    assert httpx.get(counted.url).content == bytes(_SIZE)
    _read(counted.url, [(0, _SIZE)], {"Cache-Control": "no-cache"})
    _read(counted.url, [(0, _SIZE)])


def test_a_restart_is_warm_also_after_sigkill(store: Store, tmp_path: Path) -> None:
    checkpoint, options = _write(store), ["--cache", str(tmp_path / "cache")]
    with running_daemon(store.url, options=options) as daemon:
        _read(daemon.url + _path(checkpoint), [(0, _SIZE)])
        daemon.kill()
    for _ in range(2):
        with running_daemon(store.url, options=options) as daemon:
            _read(daemon.url + _path(checkpoint), [(0, _SIZE)])
            assert (daemon.metric("ckptd_cache_store_bytes_total"), daemon.metric("ckptd_cache_bytes")) == (0, _SIZE)


def _has_missed(daemon: Daemon, count: int) -> bool:
    return daemon.metric("ckptd_cache_misses_total") >= count


def test_killed_while_it_writes_it_serves_the_right_bytes_after(store: Store, tmp_path: Path) -> None:
    checkpoint = _write(store)
    options = ["--cache", str(tmp_path / "cache"), "--cache-bytes", str(5 << 20)]  # too few: it writes all the time
    for misses in (3, 20, 40):
        with running_daemon(store.url, options=options) as daemon, ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(_read, daemon.url + _path(checkpoint), _ranges(0, 999_983) * 50) for _ in range(2)]
            wait_until(partial(_has_missed, daemon, misses), "reading")
            daemon.kill()
            assert all(isinstance(reader.exception(), httpx.TransportError) for reader in readers)
    with running_daemon(store.url, options=options) as daemon:
        _read(daemon.url + _path(checkpoint), _ranges(1, 999_983))
        kept = [path for path in (tmp_path / "cache" / "extents").iterdir() if not path.name.startswith("gpt@")]
        assert kept == []


def test_two_daemons_with_one_folder_both_serve(store: Store, tmp_path: Path) -> None:
    checkpoint, options = _write(store), ["--cache", str(tmp_path / "cache")]
    with running_daemon(store.url, options=options) as first, running_daemon(store.url, options=options) as second:
        assert "another daemon uses" in second.log()
        assert "another daemon uses" not in first.log()
        for daemon in (first, second):
            _read(daemon.url + _path(checkpoint), [(0, _SIZE)])
        assert (first.metric("ckptd_cache_bytes"), second.metric("ckptd_cache_bytes")) == (_SIZE, 0)


def test_a_deleted_checkpoint_is_not_served_and_leaves_the_cache(store: Store) -> None:
    old, new = _write(store, 1), _write(store, 2)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        for checkpoint in (old, new):
            _read(daemon.url + _path(checkpoint), [(0, _SIZE)])
        assert daemon.metric("ckptd_cache_bytes") == 2 * _SIZE
        client.prune(Prune(Policy(1), grace_s=0))
        assert daemon.get(_path(old)).status_code == 404
        wait_until(lambda: daemon.metric("ckptd_cache_bytes") == _SIZE, "dropping")
        _read(daemon.url + _path(new), [(0, _SIZE)])


def test_a_store_that_does_not_answer_empties_no_cache(store: Store, tmp_path: Path) -> None:
    checkpoint, options = _write(store), ["--cache", str(tmp_path / "cache")]
    with running_daemon(store.url, options=options) as daemon:
        _read(daemon.url + _path(checkpoint), [(0, _SIZE)])
    shutil.move(tmp_path / "store", tmp_path / "away")
    (tmp_path / "store").touch()  # not a folder: an error, and no empty store
    with running_daemon(store.url, options=options, ready=False) as daemon:
        errors = re.compile(r'ckptd_store_errors_total{.*"sync".*} ([3-9]|\d\d)')
        wait_until(lambda: errors.search(daemon.get("/metrics").text), "three rounds")
        assert daemon.log().count("cannot synchronize with the store") == daemon.log().count("WARNING") == 1
        assert daemon.metric("ckptd_cache_bytes") == _SIZE
