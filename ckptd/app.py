"""The wiring: the only place where the daemon's objects are made and joined."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI

from ckptd.api import (
    batches,
    changes,
    checkpoints,
    decisions,
    events,
    jobs,
    openapi,
    probes,
    problems,
    restores,
    tokens,
)
from ckptd.api.access import authorize
from ckptd.api.context import INDEX_THREADS, STORE_THREADS, Context, Threads
from ckptd.api.middleware import Authentication, Requests
from ckptd.api.waiting import Waiting
from ckptd.index import (
    Database,
    DecisionIndex,
    EventLog,
    Index,
    JobIndex,
    LeaderIndex,
    Listing,
    RestoreIndex,
    TokenIndex,
)
from ckptd.metrics import Metrics
from ckptd.pages import routes as pages
from ckptd.pages.browsers import Browsers
from ckptd.services import (
    Catalogue,
    Contents,
    Events,
    Freshness,
    Jobs,
    Objects,
    Protection,
    Pruning,
    Restores,
    Services,
    Synchronizing,
    Tokens,
    Uploads,
)
from ckptd.services.cache import BlockCache, open_folder
from ckptd.services.collecting import Collecting
from ckptd.services.deciding import Deciding, Proposals
from ckptd.services.gauges import Gauges
from ckptd.services.keeping import Keeping
from ckptd.services.leadership import Leadership, LeaderStore
from ckptd.services.periodic import Periodic
from ckptd.services.recovery import Recovering, Recovery
from ckptd.services.restore_leases import RestoreLeases
from ckptd.services.works import Works
from ckptd.settings import AUTH_OFF, Settings
from ckptstore.arbitration import ArbitratedStore
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import InvalidRequest
from ckptstore.examining import examine
from ckptstore.stores import Store, open_store

_LOG = logging.getLogger(__name__)
_BACKGROUND_THREADS = 18
_STOP_TIMEOUT_S = 2.0
_STALE_AFTER_ROUNDS = 6
_STALE_AFTER_S = 60.0
_WATCH_S = 0.5
_FOLLOW_S = 0.5
_RENEW_S = 1.0
_WATCH_JOBS_S = 3.0
_FORGET_S = 600.0
_FINISH_S = 60.0
_READ_TOKENS_S = 1.0
_NOTE_USE_S = 10.0


def create_app(settings: Settings, store: Store | None = None, clock: Clock = system_clock) -> FastAPI:
    """The daemon as an ASGI app; its index is migrated on return, its background work begins with its lifespan.

    store: instead of the one that settings name. Raises BadInput or IndexUnavailable.
    """
    store = store or open_store(settings.store)
    if not store.shared_between_processes:
        raise InvalidRequest(f"{store.url} is visible to one process only", "Use file:// or an object store")
    metrics = Metrics()
    database = Database(settings.db, INDEX_THREADS + STORE_THREADS + _BACKGROUND_THREADS)
    _LOG.info("serving %s with the index at %s", store.url, database.url)
    deciding = Deciding(store, DecisionIndex(database), clock)
    store = ArbitratedStore(store, deciding, clock)
    log = EventLog(database, clock)
    index = Index(database, log)
    index.adopt(store.url, clock())
    freshness = Freshness(clock, max(_STALE_AFTER_S, _STALE_AFTER_ROUNDS * settings.poll_seconds))
    leadership = Leadership(LeaderIndex(database, "janitor"), settings.leader_lease_seconds)
    leader_store = LeaderStore(store, leadership)
    synchronizing = Synchronizing(store, index, freshness, metrics, clock)
    recovery = Recovery(leader_store, clock, settings.commit_grace_seconds)
    recovering = Recovering(leader_store, index, recovery, metrics, clock, synchronizing.notify)
    cache = _open_cache(settings, store, metrics)
    catalogue = Catalogue(index, Listing(database), freshness, store.url)
    waiting = Waiting()
    restore_index = RestoreIndex(database)
    happenings = Events(log, restore_index, waiting.wake)
    restore_leases = RestoreLeases(store, restore_index, metrics, clock, happenings.restore_ended)
    objects = Objects(store, catalogue, cache)
    pruning = Pruning(store, synchronizing, metrics, clock)
    works = Works(store, synchronizing, pruning, clock, settings.orphan_grace_seconds)
    services = Services(
        catalogue=catalogue,
        contents=Contents(catalogue, objects),
        events=happenings,
        freshness=freshness,
        jobs=Jobs(JobIndex(database), happenings, clock, works.by_kind()),
        keeping=Keeping(store, clock),
        objects=objects,
        probe=partial(examine, store, clock),
        proposals=Proposals(store),
        protection=Protection(store, catalogue, clock),
        pruning=pruning,
        restores=Restores(store, catalogue, restore_index, restore_leases, clock, happenings.restore_ended),
        synchronizing=synchronizing,
        tokens=Tokens(TokenIndex(database), settings.token, clock),
        uploads=Uploads(store, clock),
    )
    services.tokens.refresh()
    metrics.registry.register(Gauges(index, restore_index, freshness, clock))
    collecting = Collecting(leader_store, metrics, clock, settings.orphan_grace_seconds)
    led_restores = RestoreIndex(database.fenced(leadership.fence))
    keeping = RestoreLeases(leader_store, led_restores, metrics, clock, happenings.restore_ended)
    led = leadership.leads
    background: list[Periodic | Jobs] = [
        services.jobs,
        Periodic("watching jobs", services.jobs.watch, _WATCH_JOBS_S),
        Periodic("following events", happenings.round, _FOLLOW_S),
        Periodic("forgetting events", happenings.forget, _FORGET_S),
        Periodic("synchronizing", synchronizing.round, settings.poll_seconds),
        Periodic("forgetting", services.objects.forget_deleted, settings.poll_seconds),
        Periodic("finishing decisions", deciding.finish, _FINISH_S),
        Periodic("leading", leadership.round, leadership.every_s),
        Periodic("following the index", catalogue.follow, _FOLLOW_S),
        Periodic("recovering", recovering.round, settings.poll_seconds, when=led),
        Periodic("collecting", collecting.round, settings.collect_seconds, when=led),
        Periodic("watching restores", services.restores.watch, _WATCH_S),
        Periodic("keeping leases of restores", keeping.round, _RENEW_S, when=led),
        Periodic("forgetting restores", services.restores.forget, _FORGET_S),
        Periodic("reading tokens", services.tokens.refresh, _READ_TOKENS_S),
        Periodic("noting the use of tokens", services.tokens.note_use, _NOTE_USE_S),
    ]
    return _assemble(
        Context(services, Threads(), metrics, waiting),
        settings.auth != AUTH_OFF,
        clock,
        background,
        [cache, leadership, database],
    )


def _open_cache(settings: Settings, store: Store, metrics: Metrics) -> BlockCache:
    wanted = settings.cache and settings.cache_bytes
    folder = open_folder(Path(settings.cache), store.url) if wanted else None
    return BlockCache(store, folder, settings.cache_bytes, settings.store_reads, metrics)


def _assemble(
    context: Context,
    auth: bool,
    clock: Clock,
    background: list[Periodic | Jobs],
    closing: list[BlockCache | Leadership | Database],
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for work in background:
            work.start()
        yield
        for work in background:
            work.stop(_STOP_TIMEOUT_S)
        for resource in closing:
            resource.close()

    app = FastAPI(
        title="ckptd",
        version=version("ckptd"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        dependencies=[Depends(authorize)],
    )
    app.state.context = context
    problems.install(app)
    openapi.install(app)
    for module in (probes, checkpoints, batches, changes, decisions, restores, events, jobs, tokens, pages):
        app.include_router(module.router)
    # The last one added is the outermost.
    known = context.services.tokens if auth else None
    app.add_middleware(Authentication, tokens=known, metrics=context.metrics)
    app.add_middleware(Browsers, tokens=known, metrics=context.metrics, clock=clock)
    app.add_middleware(Requests, metrics=context.metrics)
    return app
