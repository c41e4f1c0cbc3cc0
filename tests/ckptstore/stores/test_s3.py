"""Bulk bytes to and from S3: in bounded memory, whole or not at all, and whatever happens on the way."""

from __future__ import annotations

import logging
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, StoreReadOnly, StoreUnavailable
from ckptstore.stores import Store, open_store
from ckptstore.stores.base import is_lasting
from tests.ckptstore.proxies import LossyProxy, lossy_proxy
from tests.conftest import S3Location
from tests.support import seaweed
from tests.support.seaweed import BUCKET, SECRET_KEY, S3Service

MIB = 1 << 20
GIB = 1 << 30
SIGNED = "X-Amz-Signature"


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
