"""Gauges of checkpoints, computed at each Prometheus scrape, and metrics of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ckptapi.bodies import EventKind, RestoreState
from ckptd.index import Event, Index, RestoreIndex
from ckptd.metrics import Metrics
from ckptd.services.freshness import Freshness
from ckptstore.clock import Clock
from ckptstore.commits.goodput import Account
from ckptstore.errors import IndexUnavailable


class Gauges(Collector):
    """The newest checkpoint of each run, the restore sessions, and the lag of the index behind the store."""

    def __init__(self, index: Index, restores: RestoreIndex, freshness: Freshness, clock: Clock) -> None:
        self._index = index
        self._restores = restores
        self._freshness = freshness
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Empty, so that registration does not query the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the index; if the database is unavailable, only the lag is returned."""
        lag = GaugeMetricFamily("ckptd_index_lag_seconds", "Time since the index was known to equal the store.")
        lag.add_metric([], self._freshness.lag_s())
        yield lag
        try:
            summaries = self._index.summaries()
            num_restores = self._restores.count_by_state()
        except IndexUnavailable:
            return
        age = GaugeMetricFamily(
            "ckptd_checkpoint_age_seconds", "Time since the newest checkpoint was committed.", labels=["run"]
        )
        step = GaugeMetricFamily("ckptd_last_committed_step", "Step of the newest checkpoint.", labels=["run"])
        count = GaugeMetricFamily("ckptd_checkpoints", "Checkpoints of all states.", labels=["run"])
        stored = GaugeMetricFamily("ckptd_stored_bytes", "Bytes of the checkpoints in the store.", labels=["run"])
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


class GoodputGauges(Collector):
    """What became of the time of each run, and what is near only; no series if the daemon is not the leader."""

    def __init__(self, known: Callable[[], Mapping[str, Account]], clock: Clock) -> None:
        self._known = known
        self._clock = clock

    def describe(self) -> list[Metric]:
        """Empty: there are no series before the first account."""
        return []

    def collect(self) -> Iterator[Metric]:
        """From memory: the store is not read."""
        spent = GaugeMetricFamily(
            "ckptd_goodput_seconds", "What became of the time of a run.", labels=["run", "category"]
        )
        ratio = GaugeMetricFamily("ckptd_goodput_ratio", "Productive share of the time of a run.", labels=["run"])
        lost = GaugeMetricFamily("ckptd_lost_steps", "Steps that a run did twice.", labels=["run"])
        for run, account in self._known().items():
            for category, seconds in account.seconds.items():
                spent.add_metric([run, category], seconds)
            ratio.add_metric([run], account.goodput)
            lost.add_metric([run], account.lost_steps)
        yield from (spent, ratio, lost, *self._near_only())

    def _near_only(self) -> tuple[Metric, ...]:
        """The two ages have series only while there is a backlog."""
        count, stored, age, report_age = (
            GaugeMetricFamily(name, text, labels=["run"])
            for name, text in (
                ("ckptd_backlog_checkpoints", "Checkpoints that are in a near store only, and to be carried."),
                ("ckptd_backlog_bytes", "Stored bytes of these checkpoints."),
                ("ckptd_backlog_age_seconds", "Time since the oldest of them was committed near."),
                ("ckptd_backlog_report_age_seconds", "Time since the saver reported the backlog."),
            )
        )
        now = self._clock()
        for run, account in self._known().items():
            if (near := account.near_only) is not None:
                count.add_metric([run], near.checkpoints)
                stored.add_metric([run], near.bytes)
                if near.since is not None:
                    age.add_metric([run], max(0.0, now - near.since))
                    report_age.add_metric([run], max(0.0, now - near.at))
        return count, stored, age, report_age


class EventMetrics:
    """Updates metrics from the event log. Each event is recorded by one daemon, and therefore counted once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def count(self, events: Sequence[Event]) -> None:
        """Add events to the metrics. Any thread may call."""
        for event in events:
            detail = event.content.detail
            if event.content.kind is EventKind.COMMITTED and "save_seconds" in detail:
                self._metrics.commit_seconds.observe(detail["save_seconds"])
                self._metrics.upload_bytes.inc(detail["stored_bytes"])
            elif event.content.kind is EventKind.PRUNED:
                self._metrics.prune_deleted.inc(detail["removed"])
                self._metrics.prune_freed_bytes.inc(detail["freed_bytes"])
            elif event.content.kind is EventKind.CORRUPT:
                self._metrics.verify_failures.inc()
            elif event.content.kind is EventKind.RESTORE_ENDED and detail["state"] == RestoreState.RESTORED:
                self._metrics.restore_seconds.observe(detail["seconds"])
                self._metrics.restore_bytes_per_second.set(detail["bytes"] / max(detail["seconds"], 1e-3))
