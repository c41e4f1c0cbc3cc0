"""Counts what events say, for Prometheus: how long saves and restores take, and what is found damaged."""

from __future__ import annotations

from collections.abc import Sequence

from ckptapi.bodies import EventKind, RestoreState
from ckptd.index import Event
from ckptd.metrics import Metrics


class Figures:
    """A listener of the log of events. Each event is recorded by one daemon, and so counted once."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def tell(self, events: Sequence[Event]) -> None:
        """Count these. Any thread may call."""
        for event in events:
            detail = event.news.detail
            if event.news.kind is EventKind.COMMITTED and "save_seconds" in detail:
                self._metrics.commit_seconds.observe(detail["save_seconds"])
                self._metrics.upload_bytes.inc(detail["stored_bytes"])
            elif event.news.kind is EventKind.CORRUPT:
                self._metrics.verify_failures.inc()
            elif event.news.kind is EventKind.RESTORE_ENDED and detail["state"] == RestoreState.RESTORED:
                self._metrics.restore_seconds.observe(detail["seconds"])
                self._metrics.restore_bytes_per_second.set(detail["bytes"] / max(detail["seconds"], 1e-3))
