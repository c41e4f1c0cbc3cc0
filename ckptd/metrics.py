"""The daemon's Prometheus metrics. One registry per app, so that two apps in a process do not collide."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SLOW = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
"""Histogram buckets for saves and restores, in seconds."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


def method_label(method: str) -> str:
    """The value of the label `method`; "other" for all unknown ones, because each new value costs memory for good."""
    return method if method in _METHODS else "other"


class Metrics:
    """The counters. Any thread may use them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"ckptd_{name}", text, labels, registry=self.registry)

        self.http_requests = counter("http_requests", "Requests answered.", "method", "route", "status")
        self.http_seconds = Histogram(
            "ckptd_http_request_seconds", "Time to the end of the response.", ["route"], registry=self.registry
        )
        self.auth_failures = counter("auth_failures", "Requests whose token was refused.", "reason")
        self.read_bytes = counter("read_bytes", "Bytes of checkpoints sent to readers.")
        self.cache_hits = counter("cache_hits", "Pieces served from the cache, or by a read that was in progress.")
        self.cache_misses = counter("cache_misses", "Pieces read from the store.")
        self.cache_served_bytes = counter("cache_served_bytes", "Bytes sent to readers through the cache.")
        self.cache_store_bytes = counter("cache_store_bytes", "Bytes read from the store for readers.")
        self.cache_evictions = counter("cache_evictions", "Pieces removed from the cache to stay within its limit.")
        self.cache_failures = counter("cache_failures", "Pieces that could not be written to the cache.")
        self.cache_bytes = Gauge("ckptd_cache_bytes", "Bytes that the cache holds on disk.", registry=self.registry)
        self.commit_seconds = Histogram(
            "ckptd_commit_seconds",
            "From the capture of a checkpoint to its commit.",
            buckets=_SLOW,
            registry=self.registry,
        )
        self.upload_bytes = counter("upload_bytes", "Stored bytes of checkpoints that were committed.")
        self.verify_failures = counter("verify_failures", "Checkpoints that were found damaged.")
        self.restore_seconds = Histogram(
            "ckptd_restore_seconds",
            "Duration of restore sessions that succeeded.",
            buckets=_SLOW,
            registry=self.registry,
        )
        self.restore_bytes_per_second = Gauge(
            "ckptd_restore_bytes_per_second",
            "Speed of the last restore session that succeeded.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "ckptd_leader", "1 if this daemon is the leader and does the housekeeping.", registry=self.registry
        )
        self.store_errors = counter("store_errors", "Requests that failed because the store failed.", "op", "code")
        self.rolled_forward = counter(
            "rolled_forward", "Attempts committed by the daemon because their own committer did not."
        )
        self.orphans_aborted = counter("orphans_aborted", "Unfinished attempts that were aborted and deleted.")
        self.orphan_freed_bytes = counter("orphan_freed_bytes", "Bytes freed by deleting orphans.")
        self.orphan_bytes = Gauge(
            "ckptd_orphan_bytes",
            "Bytes of unfinished attempts idle for an hour, at the last collection; 0 if the daemon is not the leader.",
            registry=self.registry,
        )
        self.tombstoned_bytes = Gauge(
            "ckptd_tombstoned_bytes",
            "Bytes of deleted checkpoints that wait for their sweep, at the last collection.",
            registry=self.registry,
        )
        self.policies_failed = counter("policies_failed", "Runs to which the policies could not be applied.", "code")
        self.scrubbed = counter("scrubbed", "Checkpoints read completely by the scrub.")
        self.scrubbed_bytes = counter("scrubbed_bytes", "Bytes read by the scrub.")
        self.scrub_corrupt = counter("scrub_corrupt", "Checkpoints that the scrub found damaged.")
        self.prune_deleted = counter("prune_deleted", "Checkpoints deleted by prunes.")
        self.webhooks = counter("webhooks", "Events for webhooks.", "outcome")
        self.prune_freed_bytes = counter("prune_freed_bytes", "Stored bytes of the checkpoints that prunes deleted.")
