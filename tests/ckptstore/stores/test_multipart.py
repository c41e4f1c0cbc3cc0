"""Uploads in parts and reads of ranges, on every service that has them; what differs is in test_s3.py."""

from __future__ import annotations

import re
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ckptstore.clock import system_clock
from ckptstore.errors import CorruptObject, NoSuchBucket, StoreReadOnly, StoreUnavailable
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.stores import Store, open_store
from ckptstore.stores.base import is_lasting
from ckptstore.stores.multipart import part_bytes
from ckptstore.stores.transfers import Transfers, UploadPart
from tests.ckptstore.proxies import Fault, LossyProxy, lossy_proxy
from tests.ckptstore.stores.test_base import abandon
from tests.conftest import cloud_options
from tests.support import gcs, seaweed
from tests.support.checkpoints import RUN
from tests.support.seaweed import BUCKET, S3Service

MIB = 1 << 20
GIB = 1 << 30
SCHEMES = {"s3": "s3", "gcs": "gs", "azure": "abfs"}

Proxied = tuple[Store, LossyProxy]
every_service = pytest.mark.parametrize("kind", SCHEMES)


@dataclass(frozen=True)
class Place:
    """A fresh prefix on a service."""

    kind: str
    service: Any
    """An S3Service, or the URL of another one."""
    name: str

    @property
    def endpoint(self) -> str:
        return self.service.endpoint if isinstance(self.service, S3Service) else self.service

    def open(self, endpoint: str | None = None, bucket: str = BUCKET) -> Store:
        if self.kind == "s3":
            options = {**self.service.options, "endpoint_url": endpoint or self.endpoint}
        else:
            options = cloud_options(self.kind, endpoint or self.endpoint)
        return open_store(f"{SCHEMES[self.kind]}://{bucket}/{self.name}", options)

    def pending(self) -> list[str]:
        """Uploads that were begun, of a service that lists them."""
        if self.kind == "gcs":
            with urllib.request.urlopen(f"{self.endpoint}/{BUCKET}?uploads&prefix={self.name}") as reply:
                return re.findall("<Key>([^<]*)</Key>", reply.read().decode())
        return [key for key in seaweed.pending_uploads(self.service) if key.split("/")[0] == self.name]


@pytest.fixture
def place(request: pytest.FixtureRequest, kind: str) -> Place:
    return Place(kind, request.getfixturevalue(f"{kind}_service"), uuid.uuid4().hex)


@pytest.fixture
def proxied(place: Place) -> Iterator[Proxied]:
    """A fresh place, and what stands before it."""
    with lossy_proxy(place.endpoint) as proxy:
        yield place.open(proxy.url), proxy


def write(store: Store, key: str, data: bytes) -> None:
    with store.open_writer(key, len(data)) as writer:
        for at in range(0, len(data), 3 * MIB):
            writer.write(data[at : at + 3 * MIB])


def is_part(request: str) -> bool:
    return "partNumber" in request or "comp=block&" in request


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


@every_service
@pytest.mark.usefixtures("small_parts")
def test_parts_go_up_side_by_side_within_the_memory(place: Place, noise: bytes) -> None:
    store = place.open()
    both = threading.Barrier(2, timeout=60)

    def meet(part: UploadPart) -> None:
        if part.number <= 4:
            both.wait()

    watched = watch(store, meet)
    data = noise * 2  # four parts, and a short one
    write(store, "run/a", data)
    assert watched.most_bytes == 10 * MIB, "two on their way while a third is being filled"
    assert (store.get("run/a"), [info.bytes for info in store.list("")]) == (data, [len(data)])


@every_service
@pytest.mark.usefixtures("small_parts")
def test_only_what_may_change_is_copied(place: Place, noise: bytes) -> None:
    store, buffer = place.open(), bytearray(noise)
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


@pytest.mark.parametrize("kind", ["s3", "gcs"])
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_part_that_fails_takes_the_others_back(place: Place, noise: bytes, number: int) -> None:
    store = place.open()
    begun: list[str] = []

    def fail(part: UploadPart) -> None:
        begun.extend(place.pending())
        if part.number == number:
            raise OSError("injected")

    watch(store, fail)
    with pytest.raises(StoreUnavailable, match="run/a: OSError: injected"):
        write(store, "run/a", noise)
    assert begun, "the test must begin an upload to prove anything"
    assert (place.pending(), list(store.list(""))) == ([], [])


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_an_abandoned_upload_leaves_no_parts(place: Place) -> None:
    store = place.open()
    writer = store.open_writer("run/large")
    writer.write(bytes(40 * MIB))
    assert len(place.pending()) == 1, "the test must begin an upload to prove anything"
    abandon(writer, b"some more")
    assert (list(store.list("")), place.pending()) == ([], [])


@every_service
@pytest.mark.usefixtures("small_parts")
def test_a_part_that_arrives_damaged_is_sent_again(proxied: Proxied, noise: bytes) -> None:
    store, proxy = proxied
    write(store, "run/a", noise)
    parts = [number for number, request in enumerate(proxy.requests) if is_part(request)]
    assert len(parts) == 3
    for number in parts:
        proxy.arm("flip", number)
        write(store, f"run/{number}", noise)
        assert sum(is_part(request) for request in proxy.requests) == 4
        assert store.get(f"run/{number}") == noise


@every_service
@pytest.mark.parametrize("fault", ["cut", "reset"])
def test_a_read_that_breaks_off_goes_on(proxied: Proxied, noise: bytes, fault: Fault) -> None:
    store, proxy = proxied
    store.put("run/a", noise)
    buffer = bytearray(len(noise))
    proxy.arm(fault, 0)
    store.get_range("run/a", 0, memoryview(buffer))
    assert buffer == noise
    assert len(proxy.requests) == 2
    proxy.arm(fault, 0)
    assert store.get("run/a") == noise


@every_service
def test_a_reader_takes_what_it_expects_from_one_reply(proxied: Proxied, noise: bytes) -> None:
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


@every_service
@pytest.mark.usefixtures("small_parts")
def test_a_part_whose_reply_is_lost_is_sent_again(proxied: Proxied, noise: bytes) -> None:
    """Also the last request, which may have been done: nothing is sent twice for it."""
    store, proxy = proxied
    write(store, "run/a", noise)
    requests = len(proxy.requests)
    for number in range(requests):
        proxy.arm("reset", number)
        write(store, f"run/{number}", noise)
        assert store.get(f"run/{number}") == noise
    assert not [info for info in store.list("run/") if info.bytes != len(noise)]


@every_service
@pytest.mark.usefixtures("small_parts")
def test_a_replaced_object_is_the_old_one_until_it_is_the_new_one(place: Place, noise: bytes) -> None:
    store = place.open()
    write(store, "run/a", noise)
    seen = []
    with store.open_replacement("run/a", len(noise)) as writer:
        for at in range(0, len(noise), MIB):
            writer.write(noise[::-1][at : at + MIB])
            seen.append(store.get("run/a") == noise)
    assert (set(seen), store.get("run/a") == noise[::-1]) == ({True}, True)
    abandon(store.open_replacement("run/a", len(noise)), noise)
    assert store.get("run/a") == noise[::-1]


@every_service
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("size", [MIB, 12 * MIB])
def test_a_replacement_that_fails_at_the_end_leaves_the_old_object(proxied: Proxied, noise: bytes, size: int) -> None:
    """Its size tells nothing: the old object has the same."""
    store, proxy = proxied
    write(store, "run/a", noise[:size])
    proxy.refuses = lambda request: request[0] == "P" and not is_part(request) and "uploads" not in request
    with pytest.raises(StoreReadOnly), store.open_replacement("run/a", size) as writer:
        writer.write(noise[::-1][:size])
    proxy.refuses = lambda _: False
    assert store.get("run/a") == noise[:size]


@pytest.mark.parametrize("kind", ["gcs", "azure"])  # SeaweedFS creates a bucket with the first write
@pytest.mark.usefixtures("small_parts")
def test_an_upload_to_a_missing_bucket_says_how_to_make_it(place: Place, noise: bytes) -> None:
    store = place.open(bucket="missing")
    command = "gcloud storage buckets create gs://missing" if place.kind == "gcs" else "az storage container create"
    for size in (0, len(noise)):  # one request, and parts
        with pytest.raises(NoSuchBucket, match=r"bucket of \w+://missing/\S+ does not exist") as caught:
            write(store, "run/a", noise[:size])
        assert command in caught.value.hint
        assert is_lasting(caught.value)
    with pytest.raises(NoSuchBucket):
        store.put("run/a", b"x")


@pytest.mark.parametrize("kind", ["s3", "gcs"])
def test_old_uploads_are_aborted_and_young_ones_are_not(place: Place) -> None:
    store: Any = place.open()
    for _ in range(3):
        key = store._path(RunKeys(RUN).shard(Attempt(1, new_ulid(0)), "shard-00000.ckpt"))
        part = UploadPart(1, 100)
        part.take(memoryview(b"x" * 100))
        store._transfers.put_part(key, store._transfers.begin(key), part, threading.Event(), 0.0)
    prefix = RunKeys(RUN).attempts
    assert store.abort_uploads(prefix, system_clock() - 60) == 0
    assert store.abort_uploads("other/attempts/", system_clock() + 60) == 0
    assert len(place.pending()) == 3
    assert store.abort_uploads(prefix, system_clock() + 60) == 3
    assert store.abort_uploads(prefix, system_clock() + 60) == 0


@pytest.mark.parametrize("kind", ["azure"])
@pytest.mark.usefixtures("small_parts")
def test_blocks_without_a_list_are_no_object(place: Place, noise: bytes) -> None:
    """What a killed saver leaves: nobody sees it, and another upload of the same name is not disturbed."""
    store: Any = place.open()
    upload = store._transfers.begin(store._path("run/a"))
    part = UploadPart(1, 5 * MIB)
    part.take(memoryview(noise))
    store._transfers.put_part(store._path("run/a"), upload, part, threading.Event(), 0.0)
    assert (list(store.list("")), list(store.list_folders("")), store.find("run/a")) == ([], [], None)
    write(store, "run/a", noise)
    assert store.get("run/a") == noise


@pytest.mark.parametrize("kind", ["gcs"])
def test_a_zonal_bucket_is_refused(place: Place, noise: bytes) -> None:
    """Its objects would stay unfinalized, unless they are written by gRPC: no request of ours can make one."""
    store = place.open(bucket=gcs.ZONAL)
    calls: list[Callable[[], object]] = [
        lambda: store.put("run/a", b"x"), lambda: store.put_if_absent("run/a", b"x"),
        lambda: write(store, "run/a", noise), lambda: write(store, "run/a", b"x"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert is_lasting(caught.value)


class Tokens:
    """A credential of Azure, whose tokens the service looks at."""

    def __init__(self) -> None:
        self.given = 0

    async def get_token(self, *_: str, **__: Any) -> Any:
        self.given += 1
        return type("Token", (), {"token": f"T{self.given}"})


@pytest.mark.parametrize("kind", ["azure"])
def test_what_authorizes_a_request_to_azure(place: Place) -> None:
    """A signature by the account's key, a signature that was given, a token of an identity, or nothing."""
    store: Any = place.open()
    transfers = store._transfers
    url, headers = transfers._readable("box/run/a b")
    assert "/box/run/a%20b?" in url
    assert re.search(r"[?&]sp=rw&|&sp=rw$", url), "no more than it needs"
    assert set(headers) == {"x-ms-version"}
    client = transfers.fs.service_client
    for credential, query, expected in ((None, "?sv=1&sig=2", ""), (None, "", ""), (Tokens(), "", "Bearer T1")):

        class Client:
            api_version, url = client.api_version, f"https://a.blob.core.windows.net/{query}"

        Client.credential = credential  # type: ignore[attr-defined]
        transfers.fs = type("Files", (), {"service_client": Client, "loop": store._fs.loop})
        url, headers = transfers._readable("box/a")
        assert url.rstrip("?") == f"https://a.blob.core.windows.net/box/a{query}"
        assert headers.get("Authorization", "") == expected


@pytest.mark.parametrize("kind", ["gcs"])
def test_what_authorizes_a_request_to_google(place: Place) -> None:
    store: Any = place.open()
    files = store._fs
    given: dict[str, Any] = {"project": "p", "requester_pays": True, "token": None}

    class Identity:
        def apply(self, headers: dict[str, str]) -> None:
            headers["authorization"] = "Bearer T"

    class Files:
        _location, credentials, requester_pays, project = files._location, Identity(), True, "p"
        _get_params, _get_headers = type(files)._get_params, type(files)._get_headers

    store._transfers.fs = Files()
    url, headers = store._transfers._readable("box/run/a b")
    assert url == f"{place.endpoint}/box/run/a%20b"
    assert (headers["authorization"], headers["x-goog-user-project"]) == ("Bearer T", given["project"])


@pytest.mark.parametrize("kind", ["gcs", "azure"])
@pytest.mark.usefixtures("small_parts")
def test_a_proxy_of_the_environment_is_used(place: Place, noise: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library does: gcsfs if it is told to, adlfs always."""
    with lossy_proxy(place.endpoint) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "")
        options: dict[str, Any] = {"session_kwargs": {"trust_env": True}} if place.kind == "gcs" else {}
        options |= cloud_options(place.kind, place.endpoint)
        store: Any = open_store(f"{SCHEMES[place.kind]}://{BUCKET}/{place.name}", options)
        assert store._transfers._connections.proxy is not None
        assert store._transfers._connections.proxy.url == proxy.url
