"""The agent: serves the local tier of this host to the other hosts of its jobs (ckptapi.hosts)."""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import signal
import time
from contextlib import suppress

import xxhash
from fastapi import APIRouter, FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response

from ckptapi.hosts import BLOCK_BYTES, NOTE, PROOF, TRAINER, boot_id, proof, read_members
from ckptd.http.concurrency import Waiting
from ckptd.http.problems import error_response
from ckptd.http.streaming import MEDIA_TYPE
from ckptd.metrics import Metrics
from ckptd.server import serve
from ckptd.settings import Settings
from ckptstore import names
from ckptstore.errors import CkptError, InvalidRequest, Unauthorized
from ckptstore.reading.source import StoreSource
from ckptstore.stores import ObjectWriter, open_store
from ckptstore.stores.local import LocalStore
from ckptstore.threads import start_daemon

_LOG = logging.getLogger(__name__)
_LOOK_S = 2.0
router = APIRouter()


class AgentContext:
    """One agent."""

    leaving = False

    def __init__(self, store: LocalStore) -> None:
        self.store, self.id = store, StoreSource(store).id()
        self.metrics, self.waiting = Metrics(), Waiting()
        self.asked_at = time.monotonic()
        self.folder = store.root / names.HOSTS
        """Where the hosts of runs are noted."""
        self.folder.mkdir(mode=0o700, exist_ok=True)


class _File(FileResponse):
    chunk_size = BLOCK_BYTES


def serve_agent(settings: Settings, idle_s: float) -> None:
    """Serve the folder of the settings' store until a signal comes; one agent serves a folder, and others end at once.

    idle_s: end when no process of this host needs the agent, and no request came for this time; 0: never. Raises
    InvalidRequest if the store is no folder.
    """
    store = open_store(settings.store)
    if not isinstance(store, LocalStore):
        raise InvalidRequest(
            f"{settings.store} is not a folder", "Give the local tier of this host: --store file:///..."
        )
    context = AgentContext(store)
    lock = os.open(context.folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _LOG.info("%s has an agent", store.url)
        return
    if idle_s:
        start_daemon("ckptd-idle", _end_when_idle, context, idle_s)
    serve(create_agent(context), settings, lambda url: _note(context, url))
    (context.folder / NOTE).unlink(missing_ok=True)


def create_agent(context: AgentContext) -> FastAPI:
    """The agent as an ASGI app."""
    app = FastAPI(title="ckptd agent", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.context = context
    app.include_router(router)

    @app.exception_handler(CkptError)
    async def failed(_: Request, error: CkptError) -> Response:
        return error_response(error)

    return app


@router.get("/healthz")
async def live(request: Request) -> Response:
    """Which folder is served."""
    return JSONResponse({"id": _context(request).id})


@router.get("/objects/{key:path}")
@router.head("/objects/{key:path}")
def read(request: Request, key: str, prefix: str | None = None, folders: str | None = None) -> Response:
    """An object or a range of it; a listing; without all of them, the proof that this agent knows the token."""
    own = _authorize(request, key, *(one for one in (key or None, prefix, folders) if one is not None))
    store = _context(request).store
    if folders is not None:
        return JSONResponse([*store.list_folders(folders)])
    if prefix is not None:
        return JSONResponse([*store.list(prefix)])
    if not key:
        return PlainTextResponse("", headers={PROOF: own})
    store.size(key)  # raises ObjectMissing
    return _File(store.root / key, media_type=MEDIA_TYPE)


@router.put("/objects/{key:path}")
async def write(request: Request, key: str, create: str = "") -> Response:
    """Write an object, durable in the reply, which has its digest. create: unless it exists."""
    _authorize(request, key, key)
    store = _context(request).store
    if create:
        data = await request.body()
        created = await run_in_threadpool(store.put_if_absent, key, data)
        return PlainTextResponse("", headers={"Ckptd-Created": str(int(created))})
    digest, block = xxhash.xxh3_128(), bytearray()
    writer: ObjectWriter | None = None

    def write_block() -> ObjectWriter:
        opened = writer or store.open_replacement(key)
        opened.write(block)
        digest.update(block)
        block.clear()
        return opened

    try:
        async for part in request.stream():
            block += part
            if len(block) >= BLOCK_BYTES:
                writer = await run_in_threadpool(write_block)
        writer = await run_in_threadpool(write_block)
        await run_in_threadpool(writer.commit)
    except BaseException:
        if writer is not None:
            writer.abort()
        raise
    return PlainTextResponse(digest.hexdigest())


@router.post("/objects/")
async def delete(request: Request) -> Response:
    """Delete the objects of a run that the body lists."""
    keys = json.loads(await request.body())
    _authorize(request, "", *keys)
    await run_in_threadpool(_context(request).store.delete_many, keys)
    return PlainTextResponse("")


def _context(request: Request) -> AgentContext:
    context: AgentContext = request.app.state.context
    context.asked_at = time.monotonic()
    return context


def _authorize(request: Request, key: str, *names: str) -> str:
    """The proof that this agent knows the token of the run, to which all these keys or prefixes belong. Raises
    Unauthorized."""
    context = _context(request)
    match request.headers.get("authorization", "").split():
        case ["Ckptd", run, nonce, proved]:
            members = read_members(context.store.root, run)
        case _:
            raise Unauthorized("the request has no proof of a run's token")
    asked = (nonce, request.method, key, request.url.query)
    if members is None or not hmac.compare_digest(proof(members.token, *asked).encode(), proved.encode()):
        raise Unauthorized(f"this agent has no run {run!r} with this token")
    for name in names:
        if name.partition("/")[0] != run or ".." in name.split("/"):
            raise Unauthorized(f"{name!r} is not of run {run!r}")
    return proof(members.token, nonce, context.id)


def _note(context: AgentContext, url: str) -> None:
    """Note the address of the agent for the trainers of this host."""
    new = context.folder / f"{NOTE}.{os.getpid()}"
    new.write_text(json.dumps({"id": context.id, "url": url, "boot": boot_id()}))
    new.replace(context.folder / NOTE)


def _end_when_idle(context: AgentContext, idle_s: float) -> None:
    while True:
        time.sleep(_LOOK_S)
        for note in context.folder.glob(f"{TRAINER}*"):
            try:
                with suppress(PermissionError):  # another user's
                    os.kill(int(note.name.removeprefix(TRAINER)), 0)
                context.asked_at = time.monotonic()
            except (ValueError, ProcessLookupError):
                note.unlink(missing_ok=True)
        if time.monotonic() > context.asked_at + idle_s:
            os.kill(os.getpid(), signal.SIGTERM)
            return
