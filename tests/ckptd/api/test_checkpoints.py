from __future__ import annotations

from datetime import datetime
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest

from ckptapi import bodies
from ckptapi.client import DaemonClient
from ckptapi.opening import open_source
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.format.planning import entry_bytes, plan_reads
from ckptstore.names import Reference, RunKeys
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest, read_receipt
from ckptstore.reading.verify import verify
from ckptstore.stores import open_store
from tests.ckptd.conftest import Served
from tests.support.checkpoints import sample_arrays, whole_entries, write_checkpoint
from tests.support.daemons import running_daemon
from tests.support.waiting import wait_until


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
        for source in (client, direct):
            with pytest.raises(InvalidRequest, match="several: bert, gpt"):
                source.latest()
        for reference in ("gpt@latest", "gpt@10", served.newest.id):
            assert client.find(Reference.parse(reference)) == direct.find(Reference.parse(reference))


def test_latest_as_json_and_as_text(served: Served) -> None:
    for path in ("/checkpoints/latest", "/v1/checkpoints/latest"):
        answer = served.daemon.get(path, params={"run": "gpt"})
        assert answer.status_code == 200
        assert msgspec.json.decode(answer.content, type=bodies.CheckpointBody).checkpoint() == served.newest
        assert answer.headers["etag"] == f'"{served.newest.manifest_digest}"'
    assert served.daemon.get("/checkpoints/latest?run=gpt&format=text").text == f"{served.newest.id}\n"


def test_the_only_run_need_not_be_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with running_daemon(store.url) as daemon:
        assert daemon.get("/checkpoints/latest").status_code == 404
        first = write_checkpoint(store, "gpt", 1)
        wait_until(lambda: daemon.get("/checkpoints/latest?format=id").text == f"{first.id}\n", "the checkpoint")
        write_checkpoint(store, "bert", 2)
        wait_until(lambda: daemon.get("/checkpoints/latest").status_code == 422, "the second run")


def test_latest_for_shells(served: Served) -> None:
    def text(query: str = "", accept: str = "*/*") -> str:
        answer = served.daemon.get(f"/checkpoints/latest?run=gpt{query}", headers={"Accept": accept})
        assert answer.status_code == 200
        assert ("text/plain" in answer.headers["content-type"]) == (not answer.text.startswith("{"))
        return answer.text

    assert text("&format=id") == text("", "text/plain") == f"{served.newest.id}\n"
    assert text("&format=step") == "30\n"
    assert text("&format=env").splitlines()[:3] == [f"CKPT_ID={served.newest.id}", "CKPT_RUN=gpt", "CKPT_STEP=30"]
    assert text("", "application/json, text/plain").startswith("{")
    assert text("&format=json", "text/plain").startswith("{")
    assert text("", "text/html,*/*;q=0.8").startswith("{")


def test_times_are_given_in_rfc_3339_as_well(served: Served) -> None:
    body = served.daemon.get("/checkpoints/latest?run=gpt").json()
    for name in ("committed", "created"):
        assert datetime.fromisoformat(body[name]).timestamp() == pytest.approx(body[f"{name}_at"], abs=0.001)
        assert body[name].endswith("Z")
    for event in served.daemon.get("/v1/events?after=0").json()["items"]:
        assert datetime.fromisoformat(event["time"]).timestamp() == pytest.approx(event["at"], abs=0.001)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/checkpoints/latest?Run=gpt", "Did you mean 'run'?"),
        ("/v1/checkpoints/latest?run=gpt&fromat=text", "Did you mean 'format'?"),
        ("/v1/checkpoints?metrics=loss<=1", "Did you mean 'metric'?"),
        ("/v1/checkpoints/gpt@10?verbose=1", "It takes none"),
        ("/v1/runs?run=gpt", "It takes none"),
    ],
)
def test_a_query_parameter_that_is_not_known_is_refused(served: Served, path: str, hint: str) -> None:
    for method in ("GET", "HEAD"):
        assert httpx.request(method, served.daemon.url + path).status_code == 422
    problem = served.daemon.get(path).json()
    assert (problem["code"], problem["hint"]) == ("invalid_request", hint)
    assert served.daemon.get("/healthz?probe=1").status_code == 200, "monitoring adds parameters"
    assert served.daemon.get("/?utm_source=mail").status_code == 200


@pytest.mark.parametrize(
    "path", ["/livez", "/checkpoints/latest?run=gpt", "/checkpoints/latest?run=none", "/v1/runs", "/"]
)
def test_head_is_get_without_the_body(served: Served, path: str) -> None:
    whole, head = served.daemon.get(path), httpx.head(served.daemon.url + path)
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
    assert (answer.status_code, answer.headers["content-type"]) == (404, bodies.PROBLEM)
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
