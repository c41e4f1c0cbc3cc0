from __future__ import annotations

import socket
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon


def _hex(base64_text: str) -> str:
    return b64decode(base64_text).hex()


def test_requests_are_traced_to_a_collector(store: Store) -> None:
    write_checkpoint(store, step=1)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with running_collector() as collector:
        with running_daemon(store.url, options=("--otlp-endpoint", collector.url)) as daemon:
            headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-ID": "traced"}
            daemon.get("/checkpoints/latest?run=gpt", headers=headers)
            daemon.get("/v1/checkpoints/gpt@99", headers=headers)
        assert set(collector.paths) == {"/v1/traces"}
        spans = [span for span in collector.spans if _hex(span["traceId"]) == trace]
    by_name = {span["name"]: span for span in spans}
    request = by_name["GET /checkpoints/latest"]
    assert (_hex(request["parentSpanId"]), request["kind"], request["service"]) == (parent, "SPAN_KIND_SERVER", "ckptd")
    assert (
        request["attributes"].items()
        >= {
            "http.request.method": "GET",
            "http.route": "/checkpoints/latest",
            "http.response.status_code": "200",
            "url.path": "/checkpoints/latest",
            "url.query": "",
            "http.response.header.x_request_id": {"values": [{"stringValue": "traced"}]},
        }.items()
    )
    assert "run=gpt" not in str(spans)
    assert by_name["GET /v1/checkpoints/{id}"]["attributes"]["http.response.status_code"] == "404"
    inner = [span for span in spans if span["name"] in ("index", "store")]
    assert {span["parentSpanId"] for span in inner} <= {span["spanId"] for span in spans}
    assert inner


def test_a_collector_that_is_away_disturbs_no_request(store: Store) -> None:
    write_checkpoint(store, step=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens here
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with running_daemon(store.url, options=("--otlp-endpoint", endpoint)) as daemon:
            assert (daemon.get("/checkpoints/latest").status_code, daemon.stop()) == (200, 0)


@dataclass(slots=True)
class Collector:
    """Where it listens, and what came. Spans are as in OTLP's JSON, their attributes a plain dict."""

    url: str
    paths: list[str] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)

    def take(self, path: str, data: bytes) -> None:
        self.paths.append(path)
        request = ExportTraceServiceRequest.FromString(data)  # type: ignore[no-untyped-call]
        for resource in request.resource_spans:
            attributes = MessageToDict(resource.resource)["attributes"]  # type: ignore[no-untyped-call]
            service = _plain(attributes)["service.name"]
            for scope in resource.scope_spans:
                for span in map(MessageToDict, scope.spans):
                    self.spans.append({**span, "attributes": _plain(span.get("attributes", [])), "service": service})


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port, gone at the end."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in attributes}
