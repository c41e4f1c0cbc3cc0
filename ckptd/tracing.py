"""Traces, if a collector is configured: a span per request, and one per call to the index or store.

OpenTelemetry comes with the extra `otel` and is imported only if tracing is on. Spans join the caller's trace
(traceparent).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckptd.metrics import method_label
from ckptstore.errors import InvalidRequest

Span = Callable[[str], AbstractContextManager[Any]]
"""Opens a span; it ends when the context exits."""
_TIMEOUT_S = 2


def no_span(_: str) -> AbstractContextManager[None]:
    """A span that does nothing, for when tracing is off."""
    return nullcontext()


class Tracer:
    """Sends spans to a collector over HTTP in the background, without retries. Any thread may use it."""

    def __init__(self, endpoint: str) -> None:
        """Raises InvalidRequest without the extra `otel`."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise InvalidRequest("traces need OpenTelemetry", "pip install 'ckptd[otel]'") from error
        resource = Resource.create({"service.name": "ckptd", "service.version": version("ckptd")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("ckptd")

    def span(self, name: str) -> AbstractContextManager[Any]:
        """A span within the current one."""
        return self._tracer.start_as_current_span(name)

    def request(self, headers: Headers) -> AbstractContextManager[Any]:
        """A span for a request, as a child of the caller's span."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        return self._tracer.start_as_current_span("request", context=extract(headers), kind=SpanKind.SERVER)

    def close(self) -> None:
        """Flush the remaining spans, for two seconds at most."""
        self._provider.force_flush(_TIMEOUT_S * 1000)
        self._provider.shutdown()


class Tracing:
    """The outermost middleware if tracing is on."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Trace one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._tracer.request(Headers(scope=scope)) as span:

            async def observe(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    span.set_attribute("ckptd.request_id", MutableHeaders(scope=message).get("x-request-id", ""))
                await send(message)

            try:
                await self._app(scope, receive, observe)
            finally:
                route = getattr(scope.get("route"), "path", "none")
                method = method_label(scope["method"])
                span.update_name(f"{method} {route}")
                span.set_attribute("http.request.method", method)
                span.set_attribute("http.route", route)
                span.set_attribute("url.path", scope["path"])
