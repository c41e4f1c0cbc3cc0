"""A collector of traces: takes what an OTLP exporter sends over HTTP, and keeps it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(slots=True)
class Collector:
    """Where it listens, and what came. Spans are as in OTLP's JSON, their attributes a plain dict."""

    url: str
    paths: list[str] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)

    def take(self, path: str, data: bytes) -> None:
        """Keep what one request brings."""
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
