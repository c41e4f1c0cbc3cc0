from __future__ import annotations

import socket
from base64 import b64decode
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ckptstore.stores import Store
from tests.ckptapi.scripted import Answer, Request, scripted_daemon
from tests.support.checkpoints import write_checkpoint
from tests.support.daemons import running_daemon


def _hex(base64_text: str) -> str:
    return b64decode(base64_text).hex()


def test_requests_are_traced_to_a_collector(store: Store) -> None:
    write_checkpoint(store, step=1)
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    with scripted_daemon([Answer(200, b"")]) as collector:
        with running_daemon(store.url, options=("--otlp-endpoint", collector.url)) as daemon:
            headers = {"traceparent": f"00-{trace}-{parent}-01", "X-Request-ID": "traced"}
            daemon.get("/checkpoints/latest?run=gpt", headers=headers)
            daemon.get("/v1/checkpoints/gpt@99", headers=headers)
        assert {request.path for request in collector.requests} == {"/v1/traces"}
        sent = [span for request in collector.requests for span in _spans(request)]
        spans = [span for span in sent if _hex(span["traceId"]) == trace]
    by_name = {span["name"]: span for span in spans}
    request = by_name["GET /checkpoints/latest"]
    assert (_hex(request["parentSpanId"]), request["kind"], request["service"]) == (parent, "SPAN_KIND_SERVER", "ckptd")
    expected = {
        "http.request.method": "GET", "http.route": "/checkpoints/latest", "http.response.status_code": "200",
        "url.path": "/checkpoints/latest", "url.query": "",
        "http.response.header.x_request_id": {"values": [{"stringValue": "traced"}]},
    }  # fmt: skip
    assert request["attributes"].items() >= expected.items()
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


def _spans(request: Request) -> list[dict[str, Any]]:
    """As in OTLP's JSON, their attributes a plain dict, with the name of the service."""
    found: list[dict[str, Any]] = []
    for resource in ExportTraceServiceRequest.FromString(request.body).resource_spans:  # type: ignore[no-untyped-call]
        service = _plain(MessageToDict(resource.resource)["attributes"])["service.name"]  # type: ignore[no-untyped-call]
        spans = map(MessageToDict, (span for scope in resource.scope_spans for span in scope.spans))
        found += [{**span, "attributes": _plain(span.get("attributes", [])), "service": service} for span in spans]
    return found


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in attributes}
