from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError  # type: ignore[import-untyped]
from s3fs.errors import translate_boto_error

from ckptstore.errors import CkptError, NoSuchBucket, ObjectMissing, StoreFull, StoreReadOnly, StoreUnavailable
from ckptstore.format.documents import digest
from ckptstore.stores import Store, open_store
from ckptstore.stores.base import store_errors
from ckptstore.stores.retrying import RetryingStore
from tests.conftest import every_store
from tests.support.seaweed import BUCKET, RestartableService
from tests.support.stores import Faults, FaultyStore, Mode
from tests.support.waiting import wait_until

CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("r/a", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("r/new", b"x"),
    "get": lambda store: store.get("r/a"),
    "read_into": lambda store: store.read_into("r/a", 0, memoryview(bytearray(1))),
    "get_range": lambda store: store.get_range("r/a", 0, memoryview(bytearray(1))),
    "size": lambda store: store.size("r/a"),
    "list": lambda store: [info.key for info in store.list("r/")],
    "list_folders": lambda store: [*store.list_folders("")],
    "delete": lambda store: store.delete_many(["r/a"]),
}


def of_s3fs(code: str, status: int) -> Exception:
    """As s3fs raises it for such a reply."""
    reply: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(reply, "PutObject"))  # type: ignore[no-any-return, no-untyped-call]


class Outage(Faults):
    """Every request fails with this error until `lasts` of them have failed."""

    def __init__(self, error: Callable[[], Exception], lasts: int) -> None:
        super().__init__()
        self._error, self._lasts = error, lasts

    def around(self, what: str, call: Callable[[], object]) -> object:  # type: ignore[override]
        if len(self.calls) < self._lasts:
            self.calls.append(what)
            with store_errors("reach", "there"):
                raise self._error()
        return call()


def retrying(store: Store, faults: Faults, retry_s: float = 60.0) -> tuple[RetryingStore, list[float]]:
    """The store behind faults and retries, and the pauses between these, which take no time."""
    pauses: list[float] = []
    return RetryingStore(FaultyStore(store, faults), retry_s, pauses.append), pauses


@every_store
@pytest.mark.parametrize("name", CALLS)
def test_an_outage_of_three_requests_is_not_noticed(store: Store, name: str, caplog: pytest.LogCaptureFixture) -> None:
    store.put("r/a", b"x")
    outage = Outage(lambda: StoreUnavailable("away"), lasts=3)
    away, pauses = retrying(store, outage)
    found = CALLS[name](away)
    assert found == {"put_if_absent": True, "get": b"x", "read_into": 1, "size": 1, "list": ["r/a"]}.get(name, found)
    assert away.take_retries() == len(pauses) == 3
    assert [0.05 * 2**n <= pause <= 0.1 * 2**n for n, pause in enumerate(pauses)] == [True] * 3
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings[0] == f"{store.url} does not answer, requests are repeated for 60 s more: away"
    assert "answers again" in warnings[1]
    assert len(warnings) == 2, "one outage is logged once"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (lambda: NoSuchBucket("no bucket"), NoSuchBucket),
        (lambda: PermissionError(errno.EACCES, "denied"), StoreReadOnly),
        (lambda: OSError(errno.ENOSPC, "full"), StoreFull), (lambda: OSError(errno.EDQUOT, "quota"), StoreFull),
        (lambda: FileNotFoundError(errno.ENOENT, "missing"), ObjectMissing),
        (lambda: OSError(errno.EINVAL, "a bad request"), StoreUnavailable),
        (lambda: FileExistsError(errno.EEXIST, "it exists"), StoreUnavailable),
        (lambda: ValueError("a bad name"), StoreUnavailable), (lambda: NotImplementedError(), StoreUnavailable),
        (lambda: NoCredentialsError(), StoreReadOnly), (lambda: of_s3fs("Unauthorized", 401), StoreReadOnly),
        (lambda: of_s3fs("InvalidToken", 400), StoreReadOnly),
    ],
)  # fmt: skip
def test_what_lasts_fails_at_once(error: Callable[[], Exception], expected: type[CkptError], tmp_path: Path) -> None:
    for call in CALLS.values():
        away, pauses = retrying(open_store(str(tmp_path)), Outage(error, lasts=1))
        with pytest.raises(expected):
            call(away)
        assert not pauses


def test_the_limit_begins_with_the_first_failure_and_ends_with_the_error(tmp_path: Path) -> None:
    outage = Outage(lambda: ConnectionRefusedError(errno.ECONNREFUSED, "refused"), lasts=10**6)
    away = RetryingStore(FaultyStore(open_store(str(tmp_path)), outage), 0.3)
    with pytest.raises(StoreUnavailable, match="refused"):
        away.get("r/a")
    assert len(outage.calls) > 1
    none, pauses = retrying(open_store(str(tmp_path)), Outage(lambda: StoreUnavailable("away"), lasts=1), retry_s=0)
    with pytest.raises(StoreUnavailable):
        none.get("r/a")
    assert not pauses


@pytest.mark.parametrize("mode", ["before", "after"])
def test_a_create_with_a_lost_reply_is_refused_and_is_there(mode: Mode, tmp_path: Path) -> None:
    away, _ = retrying(open_store(str(tmp_path)), Faults(fail_at=0, mode=mode))
    assert away.put_if_absent("r/a", b"mine") is (mode == "before")
    assert away.get("r/a") == b"mine"


def test_a_reader_opens_its_object_again(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("r/a", b"0123456789")
    for fail_at in range(4):
        away, pauses = retrying(store, Faults(fail_at=fail_at))
        first, second, third = bytearray(3), bytearray(3), bytearray(2)
        with away.open_reader("r/a") as reader:
            reader.expect(0, 10)
            reader.read(0, memoryview(first))
            reader.read_parts(3, [memoryview(second), memoryview(third)])
            assert reader.read_hashed(0, memoryview(bytearray(10))) == digest(b"0123456789")
        assert (bytes(first), bytes(second), bytes(third), len(pauses)) == (b"012", b"345", b"67", 1)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RestartableService]:
    pytest.importorskip("s3fs")
    service = RestartableService(tmp_path)
    service.start()
    try:
        yield service
    finally:
        service.stop()


@pytest.mark.slow
def test_a_real_s3_server_stops_and_starts(service: RestartableService, caplog: pytest.LogCaptureFixture) -> None:
    """Small objects, an upload whose first part is sent, the completion of another, and reads, all in one outage."""
    options = {**service.where.options, "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2}}
    # Pauses that grow would outlast the start of the server by seconds.
    store = RetryingStore(open_store(f"s3://{BUCKET}/x", options), sleep=lambda pause: time.sleep(min(pause, 0.2)))
    store.put("r/a", b"x")
    part = memoryview(bytes(5 << 20) + b"end")
    begun, complete = store.open_writer("r/begun"), store.open_writer("r/complete")
    for writer in (begun, complete):
        for _ in range(2):
            writer.write(part)
    calls: list[Callable[[], object]] = [
        lambda: [begun.write(part) for _ in range(2)], complete.commit, lambda: store.put_if_absent("r/a", b"y"),
        lambda: store.get("r/a"), lambda: [info.key for info in store.list("r/a/")],
    ]  # fmt: skip
    service.stop()
    with ThreadPoolExecutor(len(calls)) as pool:
        results = [pool.submit(call) for call in calls]
        wait_until(lambda: "requests are repeated for 120 s more" in caplog.text, "the outage is noticed")
        assert not any(result.done() for result in results[1:])  # the first one is buffered
        service.start()
        assert [result.result(100) for result in results[2:]] == [False, b"x", []]
        results[0].result(100), results[1].result(100)
    begun.commit()
    assert (store.size("r/begun"), store.size("r/complete")) == (4 * len(part), 2 * len(part))
