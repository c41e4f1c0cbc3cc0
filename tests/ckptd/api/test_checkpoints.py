"""What the daemon answers about checkpoints, and that a restore needs nothing but its URL."""

from __future__ import annotations

import httpx
import msgspec
import numpy as np
import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptapi.opening import open_source
from ckptstore.errors import NoCheckpoint
from ckptstore.format.planning import entry_bytes, plan_reads, whole_entries
from ckptstore.names import Reference, RunKeys
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest, read_receipt
from ckptstore.reading.verify import verify
from tests.ckptd.conftest import Served
from tests.support.checkpoints import sample_arrays, write_checkpoint


def test_a_restore_needs_only_the_url(served: Served) -> None:
    source = open_source(served.daemon.url)
    assert isinstance(source, DaemonClient)
    try:
        checkpoint = source.latest("gpt")
        manifest = read_manifest(source, checkpoint)
        assert read_receipt(source, checkpoint, manifest, 0).local == {"epoch": 0}
        content = manifest.content
        raw = {name: bytearray(size) for name, size in entry_bytes(content).items()}
        views = {name: memoryview(data) for name, data in raw.items()}
        fetch(source, checkpoint, plan_reads(content, whole_entries(content.entries.name)), views)
        for name, array in sample_arrays(30).items():
            assert np.frombuffer(raw[name], array.dtype).reshape(array.shape).tobytes() == array.tobytes()
        result = verify(source, checkpoint)
        assert result.ok
        assert result.num_chunks > 1
    finally:
        source.close()


def test_the_daemon_and_the_store_give_the_same_answers(served: Served) -> None:
    direct = StoreSource(served.store)
    with served.daemon.client() as client:
        assert client.runs() == direct.runs() == ["bert", "gpt"]
        assert client.checkpoints("gpt") == direct.checkpoints("gpt")
        assert list(client.candidates("gpt")) == list(direct.candidates("gpt"))
        assert client.latest() == direct.latest()
        for reference in ("gpt@latest", "gpt@10", served.newest.id):
            assert client.find(Reference.parse(reference)) == direct.find(Reference.parse(reference))


def test_latest_as_json_and_as_text(served: Served) -> None:
    for path in ("/checkpoints/latest", "/v1/checkpoints/latest"):
        answer = served.daemon.get(path, params={"run": "gpt"})
        assert answer.status_code == 200
        assert msgspec.json.decode(answer.content, type=bodies.CheckpointBody).checkpoint() == served.newest
        assert answer.headers["etag"] == f'"{served.newest.manifest_digest}"'
    assert served.daemon.get("/checkpoints/latest?run=gpt&format=text").text == f"{served.newest.id}\n"
    # bert@5 was committed last: without a run, that counts.
    assert served.daemon.get("/checkpoints/latest?format=text").text.startswith("bert@5.")


@pytest.mark.parametrize(
    "path",
    ["/livez", "/checkpoints/latest?run=gpt", "/checkpoints/latest?run=none", "/v1/runs", "/"],
)
def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    whole = served.daemon.get(path)
    head = httpx.head(served.daemon.url + path)
    assert (head.status_code, head.content) == (whole.status_code, b"")
    for name in ("content-type", "etag"):
        assert head.headers.get(name) == whole.headers.get(name)


def test_latest_is_not_sent_twice(served: Served) -> None:
    etag = served.daemon.get("/checkpoints/latest?run=gpt").headers["etag"]
    again = served.daemon.get("/checkpoints/latest?run=gpt", headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = served.daemon.get("/checkpoints/latest?run=gpt", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["/checkpoints/latest?run=none", "/v1/checkpoints/gpt@11", "/v1/checkpoints/no@latest"]
)
def test_no_checkpoint_is_404(served: Served, path: str) -> None:
    answer = served.daemon.get(path)
    problem = answer.json()
    assert answer.status_code == 404
    assert answer.headers["content-type"] == bodies.PROBLEM
    assert (problem["code"], problem["retryable"]) == ("no_checkpoint", False)
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert problem["hint"]


def test_pages_hold_everything_once_in_order(served: Served) -> None:
    with served.daemon.client() as client:
        for limit in (1, 2, 3, 5, 500):
            steps, cursor = [], None
            while True:
                page = client.page(limit=limit, cursor=cursor)
                steps += [(item.run, item.step) for item in page.items]
                assert len(page.items) <= limit
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert steps == [("bert", 5), ("gpt", 30), ("gpt", 20), ("gpt", 10), ("gpt", 0)]


def test_superseded_and_corrupt_checkpoints_are_listed_but_never_latest(served: Served) -> None:
    first = write_checkpoint(served.store, "twice", 1)
    second = write_checkpoint(served.store, "twice", 1)
    broken = write_checkpoint(served.store, "twice", 2)
    served.store.put(RunKeys("twice").outcome(broken.attempt), b"{}\n")
    with served.daemon.client() as client:
        client.notify("twice", first.attempt)
        client.notify("twice", second.attempt)
        client.notify("twice", broken.attempt)
        assert client.latest("twice") == second
        assert client.checkpoints("twice") == StoreSource(served.store).checkpoints("twice")
        assert [c.state.value for c in client.checkpoints("twice")] == ["corrupt", "committed", "superseded"]
        with pytest.raises(NoCheckpoint):
            client.find(Reference("twice", 2))


def test_every_endpoint_is_in_the_openapi_document(served: Served) -> None:
    paths = served.daemon.get("/openapi.json").json()["paths"]
    for path in (
        bodies.CHECKPOINTS,
        bodies.LATEST,
        bodies.RUNS,
        bodies.NOTIFY,
        bodies.PRUNE,
        bodies.REINDEX,
        bodies.LEASES,
    ):
        assert path in paths
