"""The context of every endpoint, and how it runs blocking code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, ParamSpec, TypeVar

from anyio import CapacityLimiter, to_thread
from fastapi import Depends, Path, Request
from starlette.convertors import StringConvertor, register_url_convertor

from ckptd.http.concurrency import ConcurrencyLimit, FairSemaphore, KeyedLocks, Waiting
from ckptd.metrics import Metrics
from ckptd.services import Services
from ckptd.tracing import Span
from ckptstore.commits.catalog import Checkpoint
from ckptstore.names import Reference

INDEX_THREADS = 16
STORE_THREADS = 32
READS = 24

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(kw_only=True)
class Threads:
    """Two thread pools, so that a store that hangs cannot block requests that need the index only."""

    span: Span = nullcontext
    """Opens a tracing span around each call."""

    def __post_init__(self) -> None:
        self._index = CapacityLimiter(INDEX_THREADS)
        self._store = CapacityLimiter(STORE_THREADS)

    async def with_index(self, work: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
        """Run a function that uses the index only."""
        with self.span("index"):
            return await to_thread.run_sync(partial(work, *args, **options), limiter=self._index)

    async def with_store(self, work: Callable[_P, _R], *args: _P.args, **options: _P.kwargs) -> _R:
        """Run a function that waits for the store. On cancellation the thread finishes in the background."""
        with self.span("store"):
            call = partial(work, *args, **options)
            return await to_thread.run_sync(call, limiter=self._store, abandon_on_cancel=True)


@dataclass(kw_only=True)
class Context(Services, Threads):
    """One app's services, threads and counters."""

    metrics: Metrics
    waiting: Waiting
    locks: KeyedLocks = field(default_factory=KeyedLocks)
    read_slots: FairSemaphore = field(default_factory=lambda: FairSemaphore(READS))
    """Limits reads of stored objects, so that some store threads stay free for other work."""
    stream_limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit("streams of events", 16, 512))
    wait_limit: ConcurrencyLimit = field(default_factory=lambda: ConcurrencyLimit("requests that wait", 256, 8192))
    leaving: bool = False
    """SIGTERM was received; /readyz reports it."""


async def context_of(request: Request) -> Context:
    """The context of the app that answers a request."""
    context: Context = request.app.state.context
    return context


Ctx = Annotated[Context, Depends(context_of)]


class _CheckpointId(StringConvertor):
    """A checkpoint's id in a path: the name of its run may have slashes."""

    regex = "(?:.*@[^/@]*|[^/]+)"


register_url_convertor("checkpoint", _CheckpointId())


async def _reference(
    id: Annotated[str, Path(max_length=200, description="RUN@STEP, RUN@STEP.ULID or RUN@latest")],
) -> Reference:
    return Reference.parse(id)


Ref = Annotated[Reference, Depends(_reference)]
"""The reference {id} in the path."""


async def _found(context: Ctx, reference: Ref) -> Checkpoint:
    return await context.with_index(context.catalog.find, reference)


Found = Annotated[Checkpoint, Depends(_found)]
"""The checkpoint {id} in the path."""
