"""Events: as pages, or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ckptapi import bodies
from ckptd.api.checkpoints import ONE, RunName, RunQuery
from ckptd.http.access import CallerDep, validity_of
from ckptd.http.bodies import json_response, read_body
from ckptd.http.concurrency import happens
from ckptd.http.context import Context, Ctx, Ref
from ckptd.http.openapi import documented
from ckptd.http.streaming import client_of
from ckptd.services.events import ANY
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.names import check_run

router = APIRouter()
_LOG = logging.getLogger(__name__)

HEARTBEAT_S = 15.0
"""Interval of comments on an idle stream, because proxies close idle connections."""
VALIDITY_S = 3.0
"""Interval of checks whether the token of an idle stream is still valid; a stream with events checks each event."""
SEND_S = 30.0
"""A client that reads nothing for this time is disconnected. It can resume from the id of its last event."""
_BATCH = 100
_MAX_ID = 1 << 62


@router.get(bodies.EVENTS, **documented(bodies.EventsBody, also={204: "Not used; streams answer text/event-stream"}))
async def events(
    request: Request,
    ctx: Ctx,
    run: RunQuery = None,
    after: Annotated[
        int | None, Query(ge=0, lt=_MAX_ID, description="Events after this id; default: all stored events")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=bodies.MAX_EVENTS)] = 100,
    last_event_id: Annotated[str | None, Header(max_length=20)] = None,
) -> Response:
    """Events after an id, oldest first. With Accept: text/event-stream, a stream that continues with new events."""
    run = check_run(run) if run is not None else None
    if bodies.EVENT_STREAM in request.headers.get("accept", ""):
        return await _stream(request, ctx, run, _position(last_event_id, after))
    return json_response(await ctx.with_index(ctx.events.page, after or 0, run, limit))


@router.post(
    bodies.RUNS + "/{run:path}/preempt", **documented(bodies.EventBody, status=201, body=bodies.PreemptRequest)
)
async def preempt(request: Request, ctx: Ctx, caller: CallerDep, run: RunName) -> Response:
    """Give notice to the trainers of a run that they will be killed: a node-termination handler does so."""
    body = await read_body(request, bodies.PreemptRequest)
    event = await ctx.with_index(ctx.events.preempted, check_run(run), body.grace_s, body.reason, caller.name)
    return json_response(event, 201)


@router.get(ONE + "/events", **documented(bodies.EventsBody))
async def of_checkpoint(ctx: Ctx, reference: Ref) -> Response:
    """Events of one checkpoint. If it was deleted, the id must include the ULID."""
    id = str(reference)
    if reference.ulid is None:
        id = (await ctx.with_index(ctx.catalog.find, reference)).id
    items = await ctx.with_index(ctx.events.of_checkpoint, id)
    return json_response(bodies.EventsBody(items=items, last_id=items[-1].id if items else 0))


def _position(last_event_id: str | None, after: int | None) -> int | None:
    if not last_event_id:
        return after
    if not (last_event_id.isascii() and last_event_id.isdigit()) or int(last_event_id) >= _MAX_ID:
        raise InvalidRequest(f"Last-Event-ID {last_event_id!r} is not an event id", "Send the id of an event")
    return int(last_event_id)


async def _stream(request: Request, ctx: Context, run: str | None, after: int | None) -> Response:
    with ExitStack() as stack:
        stack.enter_context(ctx.stream_limit.use(client_of(request)))
        position = after if after is not None else await ctx.with_index(ctx.events.newest_id)
        return _EventStream(_messages(ctx, run, position, validity_of(request)), stack.pop_all())


async def _messages(
    ctx: Context, run: str | None, position: int, still_valid: Callable[[], bool]
) -> AsyncIterator[bytes]:
    yield _message(bodies.OPEN, position, {})
    with ctx.waiting.listen(ANY) as changed:
        while not ctx.waiting.closed:
            changed.clear()
            page = await ctx.with_index(ctx.events.page, position, run, _BATCH)
            for text in _texts(page):
                if not still_valid():
                    return
                yield text
            position = page.last_id
            if len(page.items) == _BATCH:
                continue
            for _ in range(round(HEARTBEAT_S / VALIDITY_S)):
                if await happens(changed, VALIDITY_S):
                    break
                if not still_valid():
                    return
            else:
                yield b":\n\n"


def _texts(page: bodies.EventsBody) -> list[bytes]:
    gap = [_message(bodies.GAP, page.items[0].id - 1 if page.items else page.last_id, {})] if page.gap else []
    return gap + [_message(event.kind, event.id, event) for event in page.items]


def _message(kind: str, id: int, data: Any) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (kind.encode(), id, msgspec.json.encode(data))


class _EventStream(StreamingResponse):
    """Buffers only the event being sent: the next one is read from the log after the client has received it."""

    def __init__(self, messages: AsyncIterator[bytes], stack: ExitStack) -> None:
        super().__init__(messages, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, bodies.EVENT_STREAM)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timely(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)

        with self._stack:
            try:
                await super().__call__(scope, receive, timely)
            except* TimeoutError:
                _LOG.warning("closed an event stream: the client read nothing for %.0f s", SEND_S)
            except* CkptError as errors:
                _LOG.warning("event stream ended: %s", errors.exceptions[0])
