"""Traces, if a collector is configured: a span per request, and one per call to the index or store.

OpenTelemetry comes with the extra `otel` and is imported only if tracing is on. Spans join the caller's trace
(traceparent).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.types import Scope

from ckptd.metrics import method_label, route_of
from ckptstore.errors import InvalidRequest

Span = Callable[[str], AbstractContextManager[Any]]
"""Opens a span; it ends when the context exits."""
_TIMEOUT_S = 2


class Tracer:
    """Sends spans to a collector over HTTP in the background, without retries. Any thread may use it."""

    def __init__(self, endpoint: str) -> None:
        """Raises InvalidRequest without the extra `otel`."""
        # The stable names of attributes (http.request.method) instead of the old ones (http.method).
        os.environ.setdefault("OTEL_SEMCONV_STABILITY_OPT_IN", "http")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InvalidRequest("traces need OpenTelemetry", "pip install 'ckptd[otel]'") from error
        resource = Resource.create({"service.name": "ckptd", "service.version": version("ckptd")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.span: Span = self._provider.get_tracer("ckptd").start_as_current_span
        """Opens a span within the current one."""
        self._middleware = OpenTelemetryMiddleware

    def trace_requests(self, app: FastAPI) -> None:
        """Give each request a span, as a child of the caller's. Call it last: the span includes other middleware."""
        app.add_middleware(
            self._middleware,
            tracer_provider=self._provider,
            # The query may contain secrets.
            default_span_details=lambda scope: (method_label(scope["method"]), {"url.query": ""}),
            exclude_spans=["receive", "send"],
            http_capture_headers_server_response=["x-request-id"],
        )

    def name_request(self, scope: Scope) -> None:
        """Name the current span after the route of its request, which is known only when the response begins."""
        from opentelemetry.trace import get_current_span

        route, span = route_of(scope), get_current_span()
        span.update_name(f"{method_label(scope['method'])} {route}")
        span.set_attribute("http.route", route)

    def close(self) -> None:
        """Flush the remaining spans, for two seconds at most."""
        self._provider.force_flush(_TIMEOUT_S * 1000)
        self._provider.shutdown()
