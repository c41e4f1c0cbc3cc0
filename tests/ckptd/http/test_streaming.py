from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptd.http.concurrency import FairSemaphore
from ckptd.http.context import Threads
from ckptd.http.streaming import Reader, Unsatisfiable, parse_range
from ckptd.metrics import Metrics
from ckptstore.names import RunKeys
from tests.ckptd.conftest import Served


def _url(served: Served) -> str:
    return f"{served.daemon.url}/v1/checkpoints/{served.newest.id}/shards/shard-00000.ckpt"


def _stored(served: Served) -> bytes:
    return served.store.get(RunKeys("gpt").shard(served.newest.attempt, "shard-00000.ckpt"))


def test_a_whole_shard(served: Served) -> None:
    answer, data = httpx.get(_url(served)), _stored(served)
    assert (answer.status_code, answer.content) == (200, data)
    assert (int(answer.headers["content-length"]), answer.headers["accept-ranges"]) == (len(data), "bytes")
    assert answer.headers["etag"].startswith('"')


def test_head_tells_the_size_and_sends_nothing(served: Served) -> None:
    answer = httpx.head(_url(served), headers={"Range": "bytes=0-9"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert int(answer.headers["content-length"]) == len(_stored(served))


@pytest.mark.parametrize("what", ["manifest", "receipts/0"])
def test_documents_have_ranges_and_versions_too(served: Served, what: str) -> None:
    url = f"{served.daemon.url}/v1/checkpoints/{served.newest.id}/{what}"
    whole = httpx.get(url)
    assert httpx.get(url, headers={"Range": "bytes=3-7"}).content == whole.content[3:8]
    assert httpx.get(url, headers={"If-None-Match": whole.headers["etag"]}).status_code == 304


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [("bytes=0-0", 0, 0), ("bytes=5-99", 5, 99), ("bytes=-7", -7, -1), ("bytes=100-", 100, -1), ("BYTES = 1-2", 1, 2)],
)
def test_one_range_is_206(served: Served, header: str, first: int, last: int) -> None:
    data = _stored(served)
    first, last = first % len(data), last % len(data)
    answer = httpx.get(_url(served), headers={"Range": header})
    assert (answer.status_code, answer.content) == (206, data[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/{len(data)}"


def test_a_range_that_leaves_the_end_is_cut(served: Served) -> None:
    data = _stored(served)
    answer = httpx.get(_url(served), headers={"Range": f"bytes={len(data) - 3}-{10**18}"})
    assert (answer.status_code, answer.content) == (206, data[-3:])


@pytest.mark.parametrize(
    "header",
    ["bytes=99999999999-", "bytes=-0", "bytes=5-3", "bytes=", "bytes=-", "bytes=a-b", "bytes=0-1,3-4", "bytes=1-2-3",
     "bytes=--1", "bytes=" + "9" * 4000 + "-", "bytes=0x1-2"],
)  # fmt: skip
def test_what_cannot_be_served_is_416(served: Served, header: str) -> None:
    answer = httpx.get(_url(served), headers={"Range": header})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(_stored(served))}")
    assert answer.json()["code"] == "range_not_satisfiable"


def test_other_units_are_ignored(served: Served) -> None:
    assert httpx.get(_url(served), headers={"Range": "lines=1-2"}).status_code == 200


def test_if_range_and_if_none_match(served: Served) -> None:
    etag = httpx.head(_url(served)).headers["etag"]

    def status(**headers: str) -> int:
        return httpx.get(_url(served), headers={k.replace("_", "-"): v for k, v in headers.items()}).status_code

    assert status(Range="bytes=0-3", If_Range=etag) == 206
    assert status(Range="bytes=0-3", If_Range='"older"') == 200
    assert (status(Range="bytes=0-3", If_Range=f"W/{etag}"), status(If_None_Match=etag)) == (200, 304)
    assert (status(If_None_Match=f'"x", {etag}'), status(If_None_Match='"x"')) == (304, 200)


def test_a_shard_that_is_not_there_is_404(served: Served) -> None:
    answer = httpx.get(_url(served).replace("00000", "00007"))
    assert (answer.status_code, answer.json()["code"]) == (404, "object_missing")


@given(st.integers(0, 50), st.text("bytes=-0123456789, ", max_size=20) | st.from_regex(r"bytes=\d{0,3}-\d{0,3}"))
def test_a_parsed_range_lies_inside_the_object(size: int, header: str) -> None:
    try:
        found = parse_range(header, size)
    except Unsatisfiable:
        return
    assert found is None or (found.start >= 0 and len(found) > 0 and found.stop <= size)


def test_an_empty_object_has_no_range() -> None:
    with pytest.raises(Unsatisfiable):
        parse_range("bytes=0-", 0)
    assert parse_range("bytes=0-", 1) == range(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_piece_is_read_while_the_one_before_is_sent(fails: bool) -> None:
    """After a client that closes in between, the error of a read is not raised, and no slot stays taken."""
    begun = threading.Event()

    def read(offset: int, count: int) -> memoryview:
        if offset:
            begun.set()
        if offset and fails:
            raise OSError("the store is away")
        return memoryview(b"0123456789")[offset : offset + 4]

    async def first_piece() -> memoryview:
        slots = FairSemaphore(1)
        context: Any = SimpleNamespace(with_store=Threads().with_store, metrics=Metrics(), read_slots=slots)
        reader, whole = Reader(context, "client", read), range(10)
        pieces = reader.pieces(whole, await reader.read(whole))
        sent = await anext(pieces)
        assert await asyncio.to_thread(begun.wait, 100)
        await pieces.aclose()  # type: ignore[attr-defined]
        async with slots.slot("another"):
            return sent

    assert bytes(asyncio.run(first_piece())) == b"0123"
