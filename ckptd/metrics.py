"""The daemon's Prometheus metrics. One registry per app, so that two apps in a process do not collide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import Scope

from ckptapi.bodies import EventBody, EventKind, RestoreState
from ckptd.index import Index, RestoreIndex
from ckptstore.analysis.goodput import Account
from ckptstore.clock import Clock
from ckptstore.errors import CkptError, IndexUnavailable, Unavailable

_SLOW = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
"""Histogram buckets for saves and restores, in seconds."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def method_label(method: str) -> str:
    """The value of the label `method`; "other" for unknown methods, because label values are never freed."""
    return method if method in _METHODS else "other"


def route_of(scope: Scope) -> str:
    """The path of the route that serves a request, with its parameters as {name}; "none" before it is known."""
    return getattr(scope.get("route"), "path_format", "none")


class Metrics:
    """The daemon's metrics. Any thread may use them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="ckptd", registry=self.registry)
        gauge = partial(Gauge, namespace="ckptd", registry=self.registry)
        histogram = partial(Histogram, namespace="ckptd", registry=self.registry)
        self.http_requests = counter("http_requests", "Requests answered.", ["method", "route", "status"])
        self.http_seconds = histogram("http_request_seconds", "Time to the end of the response.", ["route"])
        self.waiting_requests = gauge("waiting_requests", "Requests that wait for a change: long polls, streams.")
        self.connections_closed = counter("connections_closed", "Connections closed because of a limit.", ["reason"])
        self.auth_failures = counter("auth_failures", "Requests whose token was refused.", ["reason"])
        self.read_bytes = counter("read_bytes", "Bytes of checkpoints sent to readers.")
        self.store_errors = counter("store_errors", "Requests that failed because the store failed.", ["op", "code"])
        self.cache_hits = counter("cache_hits", "Pieces served from the cache, or by a read that was in progress.")
        self.cache_misses = counter("cache_misses", "Pieces read from the store.")
        self.cache_served_bytes = counter("cache_served_bytes", "Bytes sent to readers through the cache.")
        self.cache_store_bytes = counter("cache_store_bytes", "Bytes read from the store for readers.")
        self.cache_evictions = counter("cache_evictions", "Pieces removed from the cache to stay within its limit.")
        self.cache_failures = counter("cache_failures", "Pieces that could not be written to the cache.")
        self.cache_bytes = gauge("cache_bytes", "Bytes that the cache holds on disk.")
        self.commit_seconds = histogram(
            "commit_seconds", "From the capture of a checkpoint to its commit.", buckets=_SLOW
        )
        self.upload_bytes = counter("upload_bytes", "Stored bytes of checkpoints that were committed.")
        self.verify_failures = counter("verify_failures", "Checkpoints that were found damaged.")
        self.restore_seconds = histogram(
            "restore_seconds", "Duration of restore sessions that succeeded.", buckets=_SLOW
        )
        self.restore_bytes_per_second = gauge(
            "restore_bytes_per_second", "Speed of the last restore session that succeeded."
        )
        self.webhooks = counter("webhooks", "Events for webhooks.", ["outcome"])
        self.leader = gauge("leader", "1 if this daemon is the leader and does the housekeeping.")
        self.rolled_forward = counter(
            "rolled_forward", "Attempts committed by the daemon because their own committer did not."
        )
        self.orphans_aborted = counter("orphans_aborted", "Unfinished attempts that were aborted and deleted.")
        self.orphan_freed_bytes = counter("orphan_freed_bytes", "Bytes freed by deleting orphans.")
        self.orphan_bytes = gauge(
            "orphan_bytes",
            "Bytes of unfinished attempts idle for an hour, at the last collection; 0 if the daemon is not the leader.",
        )
        self.tombstoned_bytes = gauge(
            "tombstoned_bytes", "Bytes of deleted checkpoints that wait for their sweep, at the last collection."
        )
        self.policies_failed = counter("policies_failed", "Runs to which the policies could not be applied.", ["code"])
        self.scrubbed = counter("scrubbed", "Checkpoints read completely by the scrub.")
        self.scrubbed_bytes = counter("scrubbed_bytes", "Bytes read by the scrub.")
        self.scrub_corrupt = counter("scrub_corrupt", "Checkpoints that the scrub found damaged.")
        self.prune_deleted = counter("prune_deleted", "Checkpoints deleted by prunes.")
        self.prune_freed_bytes = counter("prune_freed_bytes", "Stored bytes of the checkpoints that prunes deleted.")

    def count_store_error(self, op: str, error: CkptError) -> None:
        """Count an error of an operation, if it says that the store failed."""
        if isinstance(error, Unavailable):
            self.store_errors.labels(op, error.code).inc()

    def count_events(self, events: Sequence[EventBody]) -> None:
        """Update the metrics from the event log. Each event is recorded by one daemon, and therefore counted once."""
        for event in events:
            detail = event.detail
            if event.kind == EventKind.COMMITTED and "save_seconds" in detail:
                self.commit_seconds.observe(detail["save_seconds"])
                self.upload_bytes.inc(detail["stored_bytes"])
            elif event.kind == EventKind.PRUNED:
                self.prune_deleted.inc(detail["removed"])
                self.prune_freed_bytes.inc(detail["freed_bytes"])
            elif event.kind == EventKind.CORRUPT:
                self.verify_failures.inc()
            elif event.kind == EventKind.RESTORE_ENDED and detail["state"] == RestoreState.RESTORED:
                self.restore_seconds.observe(detail["seconds"])
                self.restore_bytes_per_second.set(detail["bytes"] / max(detail["seconds"], 1e-3))


def _by_run(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"ckptd_{name}", text, labels=["run", *labels])


@dataclass(eq=False)
class Gauges(Collector):
    """The newest checkpoint of each run, the restore sessions, and the lag of the index behind the store."""

    _index: Index
    _restores: RestoreIndex
    _lag_s: Callable[[], float]
    _clock: Clock

    def collect(self) -> Iterator[Metric]:
        """Read the index; if the database is unavailable, only the lag is returned."""
        lag = GaugeMetricFamily("ckptd_index_lag_seconds", "Time since the index was known to equal the store.")
        lag.add_metric([], self._lag_s())
        yield lag
        try:
            summaries = self._index.summaries()
            num_restores = self._restores.count_by_state()
        except IndexUnavailable:
            return
        age = _by_run("checkpoint_age_seconds", "Time since the newest checkpoint was committed.")
        step = _by_run("last_committed_step", "Step of the newest checkpoint.")
        count = _by_run("checkpoints", "Checkpoints of all states.")
        stored = _by_run("stored_bytes", "Bytes of the checkpoints in the store.")
        now = self._clock()
        for summary in summaries:
            count.add_metric([summary.run], summary.num_checkpoints)
            stored.add_metric([summary.run], summary.stored_bytes)
            if summary.latest is not None:
                age.add_metric([summary.run], max(0.0, now - summary.latest.committed_at))
                step.add_metric([summary.run], summary.latest.step)
        restores = GaugeMetricFamily("ckptd_restores", "Restore sessions, ended ones for a day.", labels=["state"])
        for state, number in num_restores.items():
            restores.add_metric([state], number)
        yield from (age, step, count, stored, restores)


@dataclass(eq=False)
class GoodputGauges(Collector):
    """The wall-clock time of each run, and its data that is local only; no series if the daemon is not the leader."""

    _known: Callable[[], Mapping[str, Account]]
    _clock: Clock

    def collect(self) -> Iterator[Metric]:
        """From memory: the store is not read."""
        spent = _by_run("goodput_seconds", "The wall-clock time of a run by category.", "category")
        ratio = _by_run("goodput_ratio", "Productive share of the time of a run.")
        lost = _by_run("lost_steps", "Steps that a run did twice.")
        for run, account in self._known().items():
            for category, seconds in account.seconds.items():
                spent.add_metric([run, category], seconds)
            ratio.add_metric([run], account.goodput)
            lost.add_metric([run], account.lost_steps)
        yield from (spent, ratio, lost, *self._local_only())

    def _local_only(self) -> tuple[Metric, ...]:
        """The two ages have series only while there is a replication queue."""
        newest = _by_run("local_newest_step", "Step of the newest checkpoint in the local tier.")
        count = _by_run(
            "replication_queue_checkpoints", "Checkpoints that are in a local tier only, and to be replicated."
        )
        stored = _by_run("replication_queue_bytes", "Stored bytes of these checkpoints.")
        age = _by_run("replication_queue_age_seconds", "Time since the oldest of them was committed locally.")
        report_age = _by_run(
            "replication_queue_report_age_seconds", "Time since the saver reported the replication queue."
        )
        now = self._clock()
        for run, account in self._known().items():
            if (local := account.local_only) is not None:
                count.add_metric([run], local.checkpoints)
                stored.add_metric([run], local.bytes)
                if local.newest is not None:
                    newest.add_metric([run], local.newest)
                if local.since is not None:
                    age.add_metric([run], max(0.0, now - local.since))
                    report_age.add_metric([run], max(0.0, now - local.at))
        return newest, count, stored, age, report_age
