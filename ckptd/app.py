"""The wiring: the only place where the daemon's objects are made and joined."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI

from ckptd.api import changes, checkpoints, probes, problems, restores
from ckptd.api.context import INDEX_THREADS, STORE_THREADS, Context, Threads
from ckptd.api.middleware import Authentication, Requests
from ckptd.api.waiting import Waiting
from ckptd.index import Database, Index, RestoreIndex
from ckptd.metrics import Metrics
from ckptd.services import Catalogue, Freshness, Objects, Protection, Pruning, Restores, Services, Synchronizing
from ckptd.services.cache import BlockCache, open_folder
from ckptd.services.collecting import Collecting
from ckptd.services.gauges import Gauges
from ckptd.services.periodic import Periodic
from ckptd.services.recovery import Recovery
from ckptd.services.restore_leases import RestoreLeases
from ckptd.settings import Settings
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import InvalidRequest
from ckptstore.stores import Store, open_store

_LOG = logging.getLogger(__name__)
_BACKGROUND_THREADS = 6
_STOP_TIMEOUT_S = 2.0
_STALE_AFTER_ROUNDS = 6
_STALE_AFTER_S = 60.0
_WATCH_S = 0.5
_RENEW_S = 1.0
_FORGET_S = 600.0


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
    index = Index(database)
    index.adopt(store.url)
    freshness = Freshness(clock, max(_STALE_AFTER_S, _STALE_AFTER_ROUNDS * settings.poll_seconds))
    recovery = Recovery(store, clock, settings.commit_grace_seconds)
    synchronizing = Synchronizing(store, index, recovery, freshness, metrics, clock)
    cache = _open_cache(settings, store, metrics)
    catalogue = Catalogue(index, freshness, store.url)
    waiting = Waiting()
    restore_index = RestoreIndex(database)
    restore_leases = RestoreLeases(store, restore_index, metrics, clock, waiting.wake)
    services = Services(
        catalogue=catalogue,
        freshness=freshness,
        objects=Objects(store, catalogue, cache),
        protection=Protection(store, catalogue, clock),
        pruning=Pruning(store, synchronizing, metrics, clock),
        restores=Restores(store, catalogue, restore_index, restore_leases, clock, waiting.wake),
        synchronizing=synchronizing,
    )
    metrics.registry.register(Gauges(index, restore_index, freshness, clock))
    collecting = Collecting(store, metrics, clock, settings.orphan_grace_seconds)
    background = [
        Periodic("synchronizing", synchronizing.round, settings.poll_seconds),
        Periodic("forgetting", services.objects.forget_deleted, settings.poll_seconds),
        Periodic("collecting", collecting.round, settings.collect_seconds),
        Periodic("watching restores", services.restores.watch, _WATCH_S),
        Periodic("keeping leases of restores", restore_leases.round, _RENEW_S),
        Periodic("forgetting restores", services.restores.forget, _FORGET_S),
    ]
    return _assemble(Context(services, Threads(), metrics, waiting), settings.token, background, [cache, database])


def _open_cache(settings: Settings, store: Store, metrics: Metrics) -> BlockCache:
    wanted = settings.cache and settings.cache_bytes
    folder = open_folder(Path(settings.cache), store.url) if wanted else None
    return BlockCache(store, folder, settings.cache_bytes, settings.store_reads, metrics)


def _assemble(
    context: Context, token: str, background: list[Periodic], closing: list[Database | BlockCache]
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
    )
    app.state.context = context
    problems.install(app)
    for module in (probes, checkpoints, changes, restores):
        app.include_router(module.router)
    # The last one added is the outermost.
    app.add_middleware(Authentication, token=token)
    app.add_middleware(Requests, metrics=context.metrics)
    return app
