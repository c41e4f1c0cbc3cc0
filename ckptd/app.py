"""The wiring: the only place where the daemon's objects are created and connected."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, Depends, FastAPI, params
from fastapi.routing import APIRoute

from ckptapi import bodies
from ckptd.api import checkpoints, decisions, events, hub, jobs, probes, restores, retention, tokens
from ckptd.cache import BlockCache, open_folder
from ckptd.housekeeping.job_handlers import JobHandlers
from ckptd.housekeeping.leadership import Leadership, LeaderStore
from ckptd.housekeeping.policies import POLICIES, PolicyLoop
from ckptd.housekeeping.recovery import OrphanCollector, Recovery
from ckptd.housekeeping.scrubbing import Scrubber
from ckptd.housekeeping.webhooks import Webhooks
from ckptd.http import openapi, problems
from ckptd.http.access import authorize
from ckptd.http.concurrency import Waiting
from ckptd.http.context import INDEX_THREADS, STORE_THREADS, Context
from ckptd.http.middleware import Authentication, Bounds, RequestLog
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
from ckptd.metrics import Gauges, GoodputGauges, Metrics
from ckptd.pages import routes
from ckptd.pages.sessions import PageSessions
from ckptd.services import (
    Accounts,
    Catalog,
    Contents,
    Events,
    Freshness,
    Jobs,
    Objects,
    Restores,
    StoreSync,
    Tokens,
)
from ckptd.services.remote_create import RemoteCreateDecider
from ckptd.services.restores import RestoreLeases
from ckptd.services.uploads import live_uploads
from ckptd.settings import AUTH_OFF, Settings
from ckptd.tracing import Span, Tracer
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import CkptError, InvalidRequest
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import Waste
from ckptstore.stores import Store, open_store
from ckptstore.stores.checks import run_store_checks
from ckptstore.stores.remote_create import RemoteCreateStore

_LOG = logging.getLogger(__name__)
_BACKGROUND_THREADS = 20
_STOP_TIMEOUT_S = 2.0
_STALE_AFTER_ROUNDS = 6
_STALE_AFTER_S = 60.0
_CHECK_AGAIN_S = 0.5
_ACCOUNT_S = 60.0


def create_app(settings: Settings, store: Store | None = None, clock: Clock = system_clock) -> FastAPI:
    """The daemon as an ASGI app. The index is migrated on return; background work runs during the app's lifespan.

    store: overrides the store of the settings. Raises BadInput or IndexUnavailable.
    """
    store = store or open_store(settings.store)
    store.must_exist = True
    if not store.shared_between_processes:
        raise InvalidRequest(f"{store.url} is visible to one process only", "Use file:// or an object store")
    tracer = Tracer(settings.otlp_endpoint) if settings.otlp_endpoint else None
    core = _Core(settings, store, clock)
    folder = open_folder(Path(settings.cache), store.url) if settings.cache and settings.cache_bytes else None
    cache = BlockCache(core.store, folder, settings.cache_bytes, settings.store_reads, core.metrics)
    context = _context(core, cache, tracer.span if tracer else nullcontext)
    context.tokens.refresh()
    core.metrics.registry.register(Gauges(core.index, core.restores, core.freshness.lag_s, clock))
    return _assemble(
        context,
        settings.auth != AUTH_OFF,
        clock,
        [*_serving(core, context), *_housekeeping(core)],
        [cache, core.leadership, core.database],
        tracer,
    )


class _Core:
    """The objects that most services need."""

    def __init__(self, settings: Settings, store: Store, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.metrics = Metrics()
        self.database = Database(settings.db, INDEX_THREADS + STORE_THREADS + _BACKGROUND_THREADS)
        _LOG.info("serving %s with the index at %s", store.url, self.database.url)
        self.decider = RemoteCreateDecider(store, DecisionIndex(self.database), clock)
        self.store = RemoteCreateStore(store, self.decider.decide, clock)
        self.log = EventLog(self.database, clock)
        self.index = Index(self.database, self.log)
        self.index.adopt(store.url, clock())
        self.freshness = Freshness(clock, max(_STALE_AFTER_S, _STALE_AFTER_ROUNDS * settings.poll_seconds))
        self.catalog = Catalog(self.index, Listing(self.database), self.freshness, store.url)
        self.accounts = Accounts(self.store, self.catalog, clock)
        self.store_sync = StoreSync(self.store, self.index, self.freshness, self.metrics, clock)
        self.leadership = Leadership(LeaderIndex(self.database, "janitor"), settings.leader_lease_seconds)
        self.leader_store = LeaderStore(self.store, self.leadership)
        self.collector = OrphanCollector(self.leader_store, self.metrics, clock, settings.orphan_grace_seconds)
        self.waiting = Waiting()
        self.restores = RestoreIndex(self.database)
        self.events = Events(self.log, self.restores, self.waiting.wake)
        self.log.subscribe(self.metrics.count_events)
        self.metrics.leader.set_function(self.leadership.leads)
        self.metrics.waiting_requests.set_function(self.waiting.count)

    def follow(self) -> None:
        """Read the changes of other daemons on the same database, then wake the requests that wait for them."""
        self.events.follow(self.catalog.follow)

    def waste(self) -> Waste | None:
        """The bytes that the collector measured; None if this daemon is not the leader."""
        return self.collector.waste() if self.leadership.leads() else None

    def operator(self, by: str = "", store: Store | None = None) -> StoreOperator:
        """An operator of the store, or of the leader's store. Housekeeping probes the store regularly."""
        return StoreOperator(store or self.store, self.clock, by, self.store_sync.sync_run, check_deletes=False)


def _context(core: _Core, cache: BlockCache, span: Span) -> Context:
    store, clock = core.store, core.clock
    objects, source = Objects(store, core.catalog, cache), StoreSource(store, clock)
    leases = RestoreLeases(store, core.restores, core.metrics, clock, core.events.restore_ended)
    handlers = JobHandlers(
        store, core.store_sync, clock, core.settings.orphan_grace_seconds, objects.forget, core.settings.jobs_on
    )
    return Context(
        span=span,
        metrics=core.metrics,
        waiting=core.waiting,
        accounts=core.accounts,
        catalog=core.catalog,
        contents=Contents(core.catalog, objects, source, clock),
        events=core.events,
        freshness=core.freshness,
        jobs=Jobs(JobIndex(core.database), core.events, clock, handlers.by_kind()),
        objects=objects,
        probe=partial(run_store_checks, store, clock),
        operator=core.operator,
        restores=Restores(store, core.catalog, core.restores, leases, clock, core.events.restore_ended),
        source=source,
        store=store,
        store_sync=core.store_sync,
        tokens=Tokens(TokenIndex(core.database), core.settings.token, clock),
        uploads=partial(live_uploads, store, clock),
        waste=core.waste,
    )


def _serving(core: _Core, context: Context) -> list[_Background]:
    """Background work of every daemon."""
    settings = core.settings
    webhooks = Webhooks(settings.webhook_urls, settings.webhook_secret, core.metrics, core.clock)
    core.log.subscribe(webhooks.offer)
    return [
        context.jobs,
        webhooks,
        Periodic("sending heartbeats of jobs", context.jobs.watch, every_s=3.0),
        Periodic("following other daemons", core.follow, every_s=0.5),
        Periodic("deleting old events", core.events.forget, every_s=600.0),
        Periodic("synchronizing", core.store_sync.run_once, every_s=settings.poll_seconds),
        Periodic("trimming the cache", context.objects.forget_deleted, every_s=settings.poll_seconds),
        Periodic("finishing decisions", core.decider.finish, every_s=60.0),
        Periodic("renewing the lead", core.leadership.run_once, every_s=core.leadership.every_s),
        Periodic("expiring restores", context.restores.watch, every_s=0.5),
        Periodic("deleting old restore sessions", context.restores.forget, every_s=600.0),
        Periodic("reading tokens", context.tokens.refresh, every_s=1.0),
        Periodic("recording the use of tokens", context.tokens.note_use, every_s=10.0),
    ]


def _housekeeping(core: _Core) -> list[_Background]:
    """Background work of the leader."""
    led = core.leadership.leads
    settings, store, metrics, clock = core.settings, core.leader_store, core.metrics, core.clock
    recovery = Recovery(store, core.index, metrics, clock, settings.commit_grace_seconds, core.store_sync.notify)
    policies = PolicyLoop(core.index, core.operator(POLICIES, store), core.events, metrics, clock)
    scrubber = Scrubber(
        store,
        core.store_sync,
        metrics,
        clock,
        settings.scrub_days * 24 * 3600,
        settings.scrub_bytes_per_second,
        settings.verify_hours * 3600,
        settings.verify_rank_counts,
    )
    metrics.registry.register(GoodputGauges(lambda: core.accounts.known() if led() else {}, clock))
    led_restores = RestoreIndex(core.database.fenced(core.leadership.fence))
    restore_leases = RestoreLeases(store, led_restores, metrics, clock, core.events.restore_ended)
    nothing = Waste(0, 0)
    metrics.orphan_bytes.set_function(lambda: (core.waste() or nothing).orphans)
    metrics.tombstoned_bytes.set_function(lambda: (core.waste() or nothing).tombstoned)

    def answered() -> bool:
        """Whether to begin: during an outage each of them would only report it again."""
        return bool(core.store_sync.answers)

    def ready() -> bool:
        return led() and answered()

    return [
        Periodic("recovering", recovery.run_once, every_s=settings.poll_seconds, when=ready),
        Periodic("applying policies", policies.run_once, every_s=min(5.0, settings.poll_seconds), when=ready),
        Periodic("scrubbing", scrubber.run_once, every_s=1.0, when=ready),
        Periodic("collecting", core.collector.run_once, every_s=settings.collect_seconds, when=ready),
        Periodic("accounting for the time of runs", core.accounts.refresh, every_s=_ACCOUNT_S, when=answered),
        Periodic("renewing leases of restores", restore_leases.run_once, every_s=1.0, when=led),
    ]


def _assemble(
    context: Context,
    auth: bool,
    clock: Clock,
    background: list[_Background],
    closing: list[BlockCache | Leadership | Database],
    tracer: Tracer | None,
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for work in background:
            work.start()
        yield
        for work in background:
            work.stop(_STOP_TIMEOUT_S)
        for resource in (*closing, *([tracer] if tracer else [])):
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
    for module in (checkpoints, decisions, restores, retention, events, jobs, tokens):
        _include(app, module.router, [Depends(openapi.only_known)])
    # Monitoring, links and clients of the Hub add parameters of their own.
    for module in (probes, hub, routes):
        _include(app, module.router, [])
    # The last one added is the outermost.
    known = context.tokens if auth else None
    app.add_middleware(Authentication, tokens=known, metrics=context.metrics)
    app.add_middleware(PageSessions, tokens=known, metrics=context.metrics, clock=clock)
    app.add_middleware(Bounds)
    if tracer is None:
        app.add_middleware(RequestLog, metrics=context.metrics)
    else:
        app.add_middleware(RequestLog, metrics=context.metrics, on_start=tracer.name_request)
        tracer.trace_requests(app)
    return app


def _include(app: FastAPI, router: APIRouter, dependencies: list[params.Depends]) -> None:
    """Serve the endpoints of a router.

    HEAD is answered like GET; the server omits the body. Streams of events never end, so they have no HEAD.
    """
    app.include_router(router, dependencies=dependencies)
    routes = [route for route in router.routes if isinstance(route, APIRoute)]
    answered = {route.path for route in routes if "HEAD" in (route.methods or ())} | {bodies.EVENTS}
    for route in routes:
        if "GET" in (route.methods or ()) and route.path not in answered:
            app.add_api_route(
                route.path,
                route.endpoint,
                methods=["HEAD"],
                status_code=route.status_code,
                response_class=route.response_class,
                include_in_schema=False,
                dependencies=dependencies,
            )


@dataclass
class Periodic:
    """Calls `work` in a thread of its own: at once, then `every_s` seconds after each call ends.

    An error is logged and the calls continue.
    """

    name: str
    work: Callable[[], None]
    every_s: float
    when: Callable[[], bool] = lambda: True
    """A call that is due is delayed until this returns True."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        # A daemon thread: a store that never answers must not keep the process from exiting.
        self._thread = threading.Thread(target=self._loop, name=self.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Signal the thread to end and wait at most `timeout_s` seconds. Interrupting `work` must be harmless."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            if not self.when():
                self._stop.wait(min(self.every_s, _CHECK_AGAIN_S))
                continue
            try:
                self.work()
            except CkptError as error:
                _LOG.warning("%s failed: %s", self.name, error)
            except Exception:
                _LOG.exception("%s failed", self.name)
            self._stop.wait(self.every_s)


_Background = Periodic | Jobs | Webhooks
