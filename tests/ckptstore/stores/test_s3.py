"""Bulk bytes to and from S3: in bounded memory, whole or not at all, and whatever happens on the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, CorruptObject, StoreReadOnly, StoreUnavailable
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.stores import Store, multipart, open_store
from ckptstore.stores.base import is_lasting
from ckptstore.stores.multipart import MultipartStore, part_bytes
from ckptstore.stores.transfers import Transfers, UploadPart
from tests.ckptstore.proxies import Fault, LossyProxy, lossy_proxy
from tests.ckptstore.stores.test_base import abandon
from tests.conftest import S3Location
from tests.support import seaweed
from tests.support.checkpoints import RUN
from tests.support.seaweed import BUCKET, SECRET_KEY, S3Service

MIB = 1 << 20
GIB = 1 << 30
SIGNED = "X-Amz-Signature"


@pytest.fixture(scope="module")
def noise() -> bytes:
    return os.urandom(12 * MIB)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as small as S3 allows, and memory for three of them."""
    monkeypatch.setattr(multipart, "PART_BYTES", 5 * MIB)
    monkeypatch.setattr(MultipartStore, "upload_bytes", 15 * MIB)


@pytest.fixture
def proxied(s3_service: S3Service) -> Iterator[tuple[Store, LossyProxy]]:
    """A fresh place, and what stands before it."""
    with lossy_proxy(s3_service.endpoint) as proxy:
        yield open_store(f"s3://{BUCKET}/{uuid.uuid4().hex}", {**s3_service.options, "endpoint_url": proxy.url}), proxy


def write(store: Store, key: str, data: bytes) -> None:
    with store.open_writer(key, len(data)) as writer:
        for at in range(0, len(data), 3 * MIB):
            writer.write(data[at : at + 3 * MIB])


def pending(location: S3Location) -> list[str]:
    return [key for key in seaweed.pending_uploads(location.service) if key.split("/")[0] in location.url]


class WatchedTransfers:
    """The real ones; `before_part` is called with each part, and may fail it."""

    def __init__(self, transfers: Transfers, before_part: Callable[[UploadPart], None]) -> None:
        self._transfers = transfers
        self._before_part = before_part
        self._lock = threading.Lock()
        self._in_flight = 0
        self.most_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfers, name)

    def put_part(self, path: str, upload: str, part: UploadPart, *others: Any) -> dict[str, Any]:
        with self._lock:
            self._in_flight += len(part)
            self.most_bytes = max(self.most_bytes, self._in_flight)
        try:
            self._before_part(part)
            return self._transfers.put_part(path, upload, part, *others)
        finally:
            with self._lock:
                self._in_flight -= len(part)


def watch(store: Store, before_part: Callable[[UploadPart], None]) -> WatchedTransfers:
    watched = WatchedTransfers(store._transfers, before_part)  # type: ignore[attr-defined]
    store._transfers = watched  # type: ignore[attr-defined]
    return watched


@pytest.mark.parametrize("size", [1, 8 * MIB, 70 * GIB, 71 * GIB, 1000 * GIB, 5000 * GIB])
def test_parts_of_one_size_within_the_limits(size: int) -> None:
    one = part_bytes(1, size)
    assert one == part_bytes(9_999, size)
    assert 5 * MIB <= one <= 5 * GIB
    assert -(-size // one) <= 9_000


def test_parts_grow_where_the_size_is_unknown() -> None:
    sizes = [part_bytes(number, 0) for number in range(1, 10_001)]
    assert (sizes, sizes[0]) == (sorted(sizes), part_bytes(1, 1))
    assert sum(sizes) > 5000 * GIB
    assert sizes[-1] <= 5 * GIB


@pytest.mark.usefixtures("small_parts")
def test_parts_go_up_side_by_side_within_the_memory(s3_store: S3Location, noise: bytes) -> None:
    store = open_store(s3_store.url, s3_store.options)
    both = threading.Barrier(2, timeout=60)

    def meet(part: UploadPart) -> None:
        if part.number <= 4:
            both.wait()

    watched = watch(store, meet)
    data = noise * 2  # four parts, and a short one
    write(store, "run/a", data)
    assert watched.most_bytes == 10 * MIB, "two on their way while a third is being filled"
    assert (store.get("run/a"), [info.bytes for info in store.list("")]) == (data, [len(data)])


@pytest.mark.usefixtures("small_parts")
def test_only_what_may_change_is_copied(s3_store: S3Location, noise: bytes) -> None:
    store, buffer = open_store(s3_store.url, s3_store.options), bytearray(noise)
    shared: dict[int, list[bool]] = {}
    """Of the pieces of each part; parts are sent in any order."""

    def look(part: UploadPart) -> None:
        shared[part.number] = [np.shares_memory(np.frombuffer(piece, np.uint8), own) for piece in part.pieces]

    watch(store, look)
    with store.open_writer("run/a", 2 * len(noise)) as writer:
        own = np.frombuffer(buffer, np.uint8)
        writer.write(memoryview(buffer))
        buffer[:] = noise[::-1]
        writer.write(memoryview(buffer).toreadonly())
    assert store.get("run/a") == noise + noise[::-1]
    sent = [one for _, pieces in sorted(shared.items()) for one in pieces]
    assert sent == sorted(sent), "the first are copies"
    assert set(sent) == {False, True}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_fails_takes_the_others_back(s3_store: S3Location, noise: bytes, number: int) -> None:
    store = open_store(s3_store.url, s3_store.options)
    begun: list[str] = []

    def fail(part: UploadPart) -> None:
        begun.extend(pending(s3_store))
        if part.number == number:
            raise OSError("injected")

    watch(store, fail)
    with pytest.raises(StoreUnavailable, match="run/a: OSError: injected"):
        write(store, "run/a", noise)
    assert begun, "the test must begin an upload to prove anything"
    assert (pending(s3_store), list(store.list(""))) == ([], [])


def test_an_abandoned_upload_leaves_no_parts(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)
    writer = store.open_writer("run/large")
    writer.write(bytes(40 * MIB))
    assert len(pending(s3_store)) == 1, "the test must begin an upload to prove anything"
    abandon(writer, b"some more")
    assert (list(store.list("")), pending(s3_store)) == ([], [])


@pytest.mark.usefixtures("small_parts")
def test_a_part_that_arrives_damaged_is_sent_again(proxied: tuple[Store, LossyProxy], noise: bytes) -> None:
    store, proxy = proxied
    write(store, "run/a", noise)
    parts = [number for number, request in enumerate(proxy.requests) if "partNumber" in request]
    assert len(parts) == 3
    for number in parts:
        proxy.arm("flip", number)
        write(store, f"run/{number}", noise)
        assert sum("partNumber" in request for request in proxy.requests) == 4
        assert store.get(f"run/{number}") == noise


@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_read_that_breaks_off_goes_on(proxied: tuple[Store, LossyProxy], noise: bytes, fault: Fault) -> None:
    store, proxy = proxied
    store.put("run/a", noise)
    buffer = bytearray(len(noise))
    proxy.arm(fault, 0)
    store.get_range("run/a", 0, memoryview(buffer))
    assert buffer == noise
    assert len(proxy.requests) == 2
    proxy.arm(fault, 0)
    assert store.get("run/a") == noise


def test_a_reader_takes_what_it_expects_from_one_reply(proxied: tuple[Store, LossyProxy], noise: bytes) -> None:
    store, proxy = proxied
    store.put("run/a", noise)
    proxy.arm(None)

    def check(at: int, size: int) -> None:
        buffer = bytearray(size)
        reader.read(at, memoryview(buffer))
        assert buffer == noise[at : at + size]

    with store.open_reader("run/a") as reader:
        reader.expect(MIB, 4 * MIB)
        for at in (MIB, 2 * MIB, 3 * MIB + 1000, 4 * MIB + 1000):  # a gap between two of them
            check(at, MIB - 1000)
        assert len(proxy.requests) == 1
        check(0, 10)
        check(11 * MIB, 1000)
        assert len(proxy.requests) == 3, "an unexpected range is requested by itself"
        with pytest.raises(CorruptObject, match="ends after"):
            reader.read(len(noise) - 10, memoryview(bytearray(11)))
        with pytest.raises(CorruptObject, match="ends after"):
            reader.read(len(noise) + 10, memoryview(bytearray(11)))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("answer", "requests", "reason"),
    [
        ("refuses", SIGNED, "the service answered 403"),
        ("chunks", "GET ", "the service does not send the length of a range"),
    ],
    ids=["refused", "chunked"],
)
def test_s3fs_does_what_signed_urls_cannot(
    proxied: tuple[Store, LossyProxy], noise: bytes, caplog: pytest.LogCaptureFixture,
    answer: str, requests: str, reason: str,
) -> None:  # fmt: skip
    store, proxy = proxied
    setattr(proxy, answer, lambda request: requests in request)
    buffer = bytearray(len(noise))
    with caplog.at_level(logging.WARNING):
        write(store, "run/a", noise)
        store.get_range("run/a", 0, memoryview(buffer))
        assert store.get("run/a") == buffer == noise
    assert [record.message for record in caplog.records] == [f"s3fs makes all transfers, which is slower: {reason}"]
    proxy.arm(None)
    store.get_range("run/a", 0, memoryview(buffer))
    assert not [request for request in proxy.requests if SIGNED in request]


@pytest.mark.parametrize(
    ("environment", "direct"),
    [
        ({}, True), ({"no_proxy": "127.0.0.1"}, True), ({"http_proxy": "http://127.0.0.1:9"}, False),
        ({"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}, True),
    ],
)  # fmt: skip
def test_proxies_are_left_to_s3fs(
    s3_store: S3Location, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], direct: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store: Any = open_store(s3_store.url, s3_store.options)
    assert store._transfers.suitable == direct


def test_errors_tell_no_secrets(s3_service: S3Service, caplog: pytest.LogCaptureFixture) -> None:
    secrets = {"secret": f"not {SECRET_KEY}", "token": "T0KEN"}
    refused = open_store(f"s3://{BUCKET}/x", {**s3_service.options, **secrets})
    away = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"total_max_attempts": 1}}}
    nobody = open_store(f"s3://{BUCKET}/x", {**s3_service.options, **secrets, **away})
    caplog.set_level(logging.INFO)
    calls: list[Callable[[Store], object]] = [
        lambda store: store.get("a"), lambda store: store.get_range("a", 0, memoryview(bytearray(9))),
        lambda store: write(store, "a", bytes(9 * MIB)),
    ]  # fmt: skip
    for store, expected in ((refused, StoreReadOnly), (nobody, StoreUnavailable)):
        for call in calls:
            with pytest.raises(CkptError) as caught:
                call(store)
            assert type(caught.value) is expected
            for told in (str(caught.value), caplog.text):
                assert not [word for word in (*secrets.values(), SIGNED, "T0KEN") if word in told], told


def test_listings_go_from_page_to_page(s3_store: S3Location) -> None:
    store: Any = open_store(s3_store.url, s3_store.options)
    names = [f"run/{letter}/{number}" for letter in "abc" for number in range(3)]
    for name in names:
        store.put(name, b"x")
    asked: list[str] = []
    files = store._fs

    class Paged:
        def __getattr__(self, name: str) -> Any:
            return getattr(files, name)

        def call_s3(self, method: str, **parameters: Any) -> Any:
            asked.append(method)
            return files.call_s3(method, MaxKeys=2, **parameters)

    store._fs = Paged()
    assert ([info.key for info in store.list("run/")], len(asked)) == (names, 5)
    assert list(store.list_folders("run/")) == ["a", "b", "c"]


FORKS = """
import os, sys
from ckptstore.stores import open_store
url, data = sys.argv[1], os.urandom(9 << 20)

def check(store):
    for _ in range(3):
        buffer = bytearray(len(data))
        store.get_range("a", 0, memoryview(buffer))
        assert buffer == data

store = open_store(url)
with store.open_writer("a") as writer:
    writer.write(data)
check(store)
child = os.fork()
check(open_store(url) if child == 0 else store)
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_process_opens_its_own(s3_store: S3Location) -> None:
    # Python warns of forks beside threads from 3.12 on: that is what trainers do.
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKS, s3_store.url],
        env=s3_store.environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_old_uploads_are_aborted_and_young_ones_are_not(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)
    s3: Any = store._fs  # type: ignore[attr-defined]
    bucket, _, folder = s3_store.url.removeprefix("s3://").partition("/")
    key = f"{folder}/{RunKeys(RUN).shard(Attempt(1, new_ulid(0)), 'shard-00000.ckpt')}"
    begun = s3.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    s3.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=begun["UploadId"], PartNumber=1, Body=b"x" * 100)
    prefix = RunKeys(RUN).attempts
    assert store.abort_uploads(prefix, system_clock() - 60) == 0
    assert store.abort_uploads("other/attempts/", system_clock() + 60) == 0
    assert store.abort_uploads(prefix, system_clock() + 60) == 1
    assert store.abort_uploads(prefix, system_clock() + 60) == 0


@pytest.mark.parametrize("store", ["local", "memory"], indirect=True)
def test_other_stores_have_none(store: Store) -> None:
    assert store.abort_uploads("gpt/attempts/", system_clock()) == 0


def test_an_upload_that_the_service_aborts_is_an_outage_and_not_a_missing_object(s3_store: S3Location) -> None:
    store = open_store(s3_store.url, s3_store.options)

    def write_while_it_is_aborted() -> None:
        with store.open_writer("gpt/a", size_hint=24 << 20) as writer:
            writer.write(bytes(9 << 20))
            while not store.abort_uploads("gpt/", system_clock() + 60):
                pass  # the upload begins in another thread
            writer.write(bytes(15 << 20))

    with pytest.raises(StoreUnavailable, match="aborted its upload") as caught:
        write_while_it_is_aborted()
    assert is_lasting(caught.value), "the same upload is not tried for minutes"
    assert not list(store.list("gpt/"))
