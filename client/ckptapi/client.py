"""The HTTP client of ckptd: a Source, plus the operations that only a daemon offers. One method per endpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from ckptapi import bodies
from ckptapi.connection import Connection
from ckptstore.analysis.goodput import Account
from ckptstore.commits.audit import AuditEntry
from ckptstore.commits.catalog import Checkpoint, State, named
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import CorruptObject, DaemonUnavailable, InvalidRequest, PartlyDone, error_from_code
from ckptstore.format.decoding import convert, decode_json
from ckptstore.format.records import PolicySet
from ckptstore.format.statistics import SideDocument
from ckptstore.names import Attempt, Reference, check_pin, check_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.retention.deletion import CollectReport, Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.retention.pruning import Prune, PrunePlan
from ckptstore.stores import PARALLEL_READS, ObjectReader, RangeReader
from ckptstore.stores.checks import StoreReport

_SILENCE_S = 60.0
"""Read timeout of an event stream; the daemon sends a comment every quarter of it."""
_JOB_POLL_S = 0.5
_ANSWER_S = 60.0
_T = TypeVar("_T")


class DaemonClient(Connection):
    """A client of one daemon. Use it from any thread, and close it when done.

    Every method raises DaemonUnavailable if the daemon does not respond, or the error that it returned.
    """

    # Source

    parallel_reads = PARALLEL_READS
    longest_read = 0

    def runs(self) -> list[str]:
        """Names of the runs."""
        return [item.run for item in self.run_summaries()]

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """All checkpoints of a run, newest step first."""
        return list(self._pages(run))

    def candidates(self, run: str) -> Iterator[Checkpoint]:
        """The checkpoints that a restore tries, newest first. Corrupt ones are included for the report only."""
        return (c for c in self._pages(run) if c.state in (State.COMMITTED, State.CORRUPT))

    def latest(self, run: str | None = None) -> Checkpoint:
        """The newest checkpoint of a run, or of the only run. Raises InvalidRequest if there are several."""
        return self._json("GET", bodies.LATEST, bodies.CheckpointBody, run=run).checkpoint()

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint that a reference names."""
        if reference.newest:
            return self.latest(reference.run)
        if reference.name is not None:  # the name of a metric may have a slash, and a path has none
            return named(self.checkpoints(reference.run), reference, self.url)
        return self._json("GET", self._path(str(reference)), bodies.CheckpointBody).checkpoint()

    def manifest_data(self, checkpoint: Checkpoint) -> bytes:
        """The stored manifest, unchecked."""
        return self._request("GET", self._path(checkpoint.id, "manifest")).content

    def receipt_data(self, checkpoint: Checkpoint, rank: int) -> bytes:
        """The stored receipt of a rank, unchecked."""
        return self._request("GET", self._path(checkpoint.id, "receipts", str(rank))).content

    def statistics_data(self, checkpoint: Checkpoint, rank: int, side: SideDocument) -> bytes:
        """The stored statistics of a rank, unchecked. Raises CorruptObject or ObjectMissing. The daemon finds them."""
        return self._request("GET", self._path(checkpoint.id, "statistics", str(rank))).content

    def open_shard(self, checkpoint: Checkpoint, shard: str) -> ObjectReader:
        """Read stored bytes of a shard, unchecked, with one request per read."""
        path = self._path(checkpoint.id, "shards", shard)
        return RangeReader(lambda offset, buffer: self._patiently(partial(self._read_shard, path, offset, buffer)))

    def _read_shard(self, path: str, offset: int, buffer: memoryview) -> None:
        if not len(buffer):
            return
        headers = {"Range": f"bytes={offset}-{offset + len(buffer) - 1}"}
        done = 0
        with self._responding(), self._http.stream("GET", path, headers=headers) as response:
            self._raise_for(response)
            for part in response.iter_bytes(1 << 20):
                buffer[done : done + len(part)] = part[: len(buffer) - done]
                done += len(part)
        if done != len(buffer):
            raise CorruptObject(f"{self.url}{path} returned {done} bytes instead of {len(buffer)}")

    def take_lease(self, checkpoint: Checkpoint, holder: str, ttl_s: float) -> str:
        """Protect a checkpoint from deletion for `ttl_s` seconds."""
        request = bodies.LeaseRequest(id=checkpoint.id, holder=holder, ttl_s=ttl_s, thinned=checkpoint.thinned)
        # A retry after a lost response may create a second lease, which expires by itself.
        return self._patiently(partial(self._json, "POST", bodies.LEASES, bodies.LeaseBody, body=request)).lease

    def release_lease(self, run: str, lease: str) -> None:
        """End a lease."""
        self._request("DELETE", f"{bodies.LEASES}/{quote(run, safe='')}/{quote(lease, safe='')}")

    # Operations that only a daemon offers

    def run_summaries(self) -> list[bodies.RunBody]:
        """All runs with their sizes and newest checkpoints."""
        return self._items(bodies.RUNS, bodies.RunBody)

    def page(self, run: str | None = None, limit: int = 100, cursor: str | None = None) -> bodies.Page:
        """One page of a listing, by run, newest step first."""
        return self._json("GET", bodies.CHECKPOINTS, bodies.Page, run=run, limit=limit, cursor=cursor)

    def notify(self, run: str, attempt: Attempt) -> None:
        """Notify the daemon of a committed attempt; it reads the outcome from the store."""
        self._request("POST", bodies.NOTIFY, body=bodies.NotifyRequest(run, str(attempt)))

    def preempt(self, run: str, grace_s: float, reason: str = "") -> bodies.EventBody:
        """Give notice to the trainers of a run that they will be killed in `grace_s` seconds; returns the event."""
        request = bodies.PreemptRequest(grace_s=grace_s, reason=reason)
        return self._json("POST", f"{bodies.RUNS}/{quote(run, safe='')}/preempt", bodies.EventBody, body=request)

    def decide(self, request: bodies.DecisionRequest) -> bytes:
        """Propose a document; returns the first proposal of any client.

        For stores that overwrite on create. The decision is in the daemon's store on return.
        """
        return self._json("POST", bodies.DECISIONS, bodies.DecisionBody, body=request).document.encode()

    def reindex(self) -> bodies.ReindexBody:
        """Rebuild the daemon's index from the store."""
        return self._json("POST", bodies.REINDEX, bodies.ReindexBody, timeout=3600)

    # Tokens, for admins

    def tokens(self) -> list[bodies.TokenBody]:
        """All tokens, by name, without their secrets."""
        return self._items(bodies.TOKENS, bodies.TokenBody)

    def create_token(self, request: bodies.TokenRequest) -> bodies.NewTokenBody:
        """Create a token; valid on return. The secret is returned this once."""
        return self._json("POST", bodies.TOKENS, bodies.NewTokenBody, body=request)

    def rotate_token(self, name: str, request: bodies.RotateRequest) -> bodies.NewTokenBody:
        """Give a token a new secret."""
        return self._json("POST", f"{bodies.TOKENS}/{quote(name, safe='')}/rotate", bodies.NewTokenBody, body=request)

    def revoke_token(self, name: str) -> None:
        """Remove a token; the daemon refuses it on return."""
        self._request("DELETE", f"{bodies.TOKENS}/{quote(name, safe='')}")

    # Restore sessions. Every call is idempotent and may be repeated after a lost response.
    # A malformed id raises InvalidName.

    def join_restore(self, request: bodies.RestoreRequest) -> bodies.RestoreBody:
        """Join the restore of a job; all ranks get the same checkpoint, held by a lease until the end.

        A rank that needs the checkpoint for longer takes its own lease before it reports that it is restored.
        Raises NoCheckpoint, or Conflict if the session has ended or the requests of the ranks differ.
        """
        return self._json("POST", bodies.RESTORES, bodies.RestoreBody, body=request)

    def report_restore(
        self, id: str, rank: int, phase: bodies.Phase, done_bytes: int = 0, total_bytes: int = 0, problem: str = ""
    ) -> bodies.RestoreStatus:
        """Report the progress of a rank; returns the state of the session, and why it ended. Raises NotFound."""
        report = bodies.RankReport(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes, problem=problem)
        return self._json("PUT", f"{bodies.RESTORES}/{check_ulid(id)}/ranks/{rank}", bodies.RestoreStatus, body=report)

    def restore_session(self, id: str, wait_s: float = 0, ranks: bool = True) -> bodies.RestoreBody:
        """One session. Returns when it has ended, or after `wait_s` (bodies.MAX_WAIT_S at most). Raises NotFound.

        ranks: list them and detect stragglers; for a few callers, not for each of thousands of ranks.
        """
        path, timeout = f"{bodies.RESTORES}/{check_ulid(id)}", wait_s + _ANSWER_S
        return self._json("GET", path, bodies.RestoreBody, timeout=timeout, wait=wait_s, ranks=ranks)

    def restore_sessions(self, run: str | None = None, limit: int = 100) -> list[bodies.RestoreBody]:
        """Sessions of one run or all runs, newest first, without their ranks."""
        return self._items(bodies.RESTORES, bodies.RestoreBody, limit=limit, run=run)

    def cancel_restore(self, id: str) -> bodies.RestoreBody:
        """End a session and release its lease. A session that has ended is not changed. Raises NotFound."""
        return self._json("DELETE", f"{bodies.RESTORES}/{check_ulid(id)}", bodies.RestoreBody)

    # Retention. The audit log records the name of the caller's token.

    def delete(self, checkpoint: Checkpoint, grace_s: float, reason: str = "", force: bool = False) -> None:
        """Hide a checkpoint and delete it after the grace; hidden durably on return.

        force: even if it is the newest one of its run. Raises NoCheckpoint or CheckpointHeld.
        """
        self._request("DELETE", self._path(checkpoint.id), grace_s=grace_s, reason=reason, force=force or None)

    def undelete(self, reference: Reference, reason: str = "") -> Checkpoint:
        """Undo a deletion; listed, and pinned as `undeleted`, on return. Raises NoCheckpoint or SweepBegun."""
        body, path = bodies.UndeleteRequest(reason), self._path(str(reference), "undelete")
        return self._json("POST", path, bodies.CheckpointBody, body=body).checkpoint()

    def deleted(self, run: str) -> list[Deleted]:
        """Checkpoints of a run that are hidden and can be undeleted, newest step first. Raises InvalidName."""
        return self._items(bodies.DELETED, Deleted, run=run)

    def pin(self, checkpoint: Checkpoint, name: str, reason: str = "") -> None:
        """Keep a checkpoint until the pin is removed; durable on return. Raises InvalidName or NoCheckpoint."""
        self._request("PUT", self._path(checkpoint.id, "pins", check_pin(name)), reason=reason)

    def unpin(self, checkpoint: Checkpoint, name: str) -> None:
        """Remove a pin. Idempotent. Raises InvalidName or NoCheckpoint."""
        self._request("DELETE", self._path(checkpoint.id, "pins", check_pin(name)))

    def label(self, checkpoint: Checkpoint, change: LabelChange, reason: str = "") -> Checkpoint:
        """Change tags and metrics; durable on return. Raises InvalidRequest or NoCheckpoint."""
        body = bodies.LabelsRequest(tags=dict(change.tags), metrics=dict(change.metrics), reason=reason)
        return self._json("PATCH", self._path(checkpoint.id), bodies.CheckpointBody, body=body).checkpoint()

    def pins(self, run: str) -> list[NamedPin]:
        """All pins of a run, newest step first. Raises InvalidName."""
        return self._items(bodies.PINS, NamedPin, run=run)

    def audit(self, run: str, limit: int = 100) -> list[AuditEntry]:
        """The audit log of a run, newest first; bodies.MAX_PAGE records at most."""
        return self._items(bodies.AUDIT, AuditEntry, run=run, limit=limit)

    def policies(self) -> PoliciesInForce:
        """The policies in force; version 0: policies were never set."""
        return self._json("GET", bodies.POLICIES, PoliciesInForce)

    def policies_history(self, limit: int = 100) -> list[PoliciesInForce]:
        """The versions of the policies, newest first; bodies.MAX_PAGE at most."""
        return self._items(f"{bodies.POLICIES}/history", PoliciesInForce, limit=limit)

    def change_policies(self, policies: PolicySet, expected: int, reason: str = "") -> PoliciesInForce:
        """Replace version `expected` of the policies (0 for none); durable on return.

        Raises InvalidRequest, or Conflict if that is not the newest version.
        """
        request = bodies.PoliciesRequest(expected=expected, policies=policies, reason=reason)
        return self._json("PUT", bodies.POLICIES, PoliciesInForce, body=request)

    def plan_prune(self, prune: Prune) -> PrunePlan:
        """Which checkpoints a prune would delete and keep, and why. Deletes nothing.

        Raises NoCheckpoint if runs are given and no matching run has a checkpoint, or InvalidRequest if neither the
        prune nor the store has a policy.
        """
        return self._prune(prune, dry_run=True)

    def prune(self, prune: Prune, plan: PrunePlan | None = None, progress: Progress = lambda _: None) -> PrunePlan:
        """Delete what the policy does not keep. The daemon plans again; nothing is reported while it works.

        Raises NoCheckpoint, InvalidRequest, TooMuchToDelete or StoreUnsafe.
        """
        return self._prune(prune, dry_run=False)

    def collect(self, run: str | None = None, grace_s: float | None = None) -> list[CollectReport]:
        """Delete data that is due and clean up after crashes, as a job of the daemon.

        Raises InvalidRequest if a grace is given, NoCheckpoint, StoreUnsafe, or PartlyDone if the job was
        cut short.
        """
        if grace_s is not None:
            raise InvalidRequest("--grace is for stores", "A daemon has a setting of its own: --orphan-grace-seconds")
        job = self.run_job(bodies.CollectJob(run=run))
        return convert((job.result or {}).get("runs", []), list[CollectReport])

    def _prune(self, prune: Prune, dry_run: bool) -> PrunePlan:
        request = msgspec.structs.replace(prune, dry_run=dry_run)
        return self._json("POST", bodies.PRUNE, bodies.PruneBody, body=request, timeout=3600).plan()

    # Events and jobs

    def events(self, after: int = 0, run: str | None = None, limit: int = 100) -> bodies.EventsBody:
        """Events after an id, oldest first."""
        return self._json("GET", bodies.EVENTS, bodies.EventsBody, after=after, limit=limit, run=run)

    def event_stream(self, after: int | None = None, run: str | None = None) -> Iterator[bodies.EventBody]:
        """Events as they happen, after an id or from now on.

        Ends when the daemon shuts down, or when the token becomes invalid.
        The first one is of kind bodies.OPEN: its id is the start of the stream. One of kind bodies.GAP means that
        events before the next one were deleted.
        """
        headers = {"Accept": bodies.EVENT_STREAM} | ({"Last-Event-ID": str(after)} if after is not None else {})
        timeout = httpx.Timeout(_SILENCE_S, connect=5.0)
        query = {"run": run} if run is not None else {}
        stream = self._http.stream("GET", bodies.EVENTS, params=query, headers=headers, timeout=timeout)
        try:
            with self._responding(), stream as response:
                self._raise_for(response)
                yield from _parse(response.iter_lines())
        except (msgspec.DecodeError, ValueError) as error:
            raise DaemonUnavailable(f"{self.url} sent an invalid event: {error}") from error

    def start_job(self, request: bodies.JobRequest) -> bodies.JobBody:
        """Start a job; recorded on return."""
        return self._json("POST", bodies.JOBS, bodies.JobBody, body=request)

    def run_job(
        self, request: bodies.JobRequest, started: Callable[[bodies.JobBody], None] = lambda _: None
    ) -> bodies.JobBody:
        """Start a job and wait until it has succeeded. An interrupted caller leaves it running.

        started: called with the job before the wait. Raises the job's error, or PartlyDone if it was cut short.
        """
        job = self.start_job(request)
        started(job)
        job = self.wait_for_job(job)
        if job.state is bodies.JobState.FAILED:
            raise error_from_code(job.code, job.problem)
        if job.state is not bodies.JobState.SUCCEEDED:
            raise PartlyDone(f"job {job.id} was {job.state}", "Its effects so far remain; start it again for the rest")
        return job

    def wait_for_job(self, job: bodies.JobBody) -> bodies.JobBody:
        """The job when it has ended, by polling."""
        while job.state.live:
            time.sleep(_JOB_POLL_S)
            job = self.job(job.id)
        return job

    def jobs(self, limit: int = 100) -> list[bodies.JobBody]:
        """Jobs, newest first, without their logs."""
        return self._items(bodies.JOBS, bodies.JobBody, limit=limit)

    def job(self, id: str) -> bodies.JobBody:
        """One job, with the last lines of its log. Raises InvalidName or NotFound."""
        return self._json("GET", f"{bodies.JOBS}/{check_ulid(id)}", bodies.JobBody)

    def cancel_job(self, id: str) -> bodies.JobBody:
        """Cancel a job. Raises InvalidName or NotFound."""
        return self._json("DELETE", f"{bodies.JOBS}/{check_ulid(id)}", bodies.JobBody)

    def attempts(self, run: str | None = None) -> list[bodies.AttemptBody]:
        """Live uploads of one run or all runs, oldest first."""
        return self._items(bodies.ATTEMPTS, bodies.AttemptBody, run=run)

    def goodput(self, run: str) -> Account:
        """A breakdown of a run's wall-clock time. Raises NoCheckpoint if nothing is known of it."""
        return self._json("GET", bodies.GOODPUT, Account, run=run)

    def probe(self) -> StoreReport:
        """Run the checks of the store, with a few small objects."""
        return self._json("POST", bodies.PROBE, StoreReport, timeout=300)

    def shards(self, checkpoint: Checkpoint) -> list[bodies.ShardBody]:
        """The shards of a checkpoint, by rank."""
        return self._items(self._path(checkpoint.id, "shards"), bodies.ShardBody)

    def readiness(self) -> bodies.ReadinessBody:
        """The readiness of the daemon, also if it is not ready."""
        with self._responding():
            response = self._http.get("/readyz")
        try:
            return decode_json(response.content, bodies.ReadinessBody)
        except msgspec.DecodeError as error:
            raise DaemonUnavailable(f"{self.url} is not a ckptd: {error}", "Is this the daemon's URL?") from error

    def about(self) -> bodies.AboutBody:
        """The daemon's version, and its clock when it sent the response."""
        response = self._request("GET", "/openapi.json")
        try:
            document = msgspec.json.decode(response.content)
            at = parsedate_to_datetime(response.headers["date"]).timestamp() if "date" in response.headers else None
            return bodies.AboutBody(version=str(document["info"]["version"]), at=at)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise DaemonUnavailable(f"{self.url} is not a ckptd: {error}", "Is this the daemon's URL?") from error

    def _items(self, path: str, kind: type[_T], **query: Any) -> list[_T]:
        return self._json("GET", path, bodies.Items[kind], **query).items  # type: ignore[valid-type]

    def _pages(self, run: str) -> Iterator[Checkpoint]:
        cursor = None
        while True:
            page = self.page(run, limit=bodies.MAX_PAGE, cursor=cursor)
            yield from (item.checkpoint() for item in page.items)
            cursor = page.next_cursor
            if cursor is None:
                return

    def _path(self, *parts: str) -> str:
        return "/".join((bodies.CHECKPOINTS, *(quote(part, safe="@") for part in parts)))


def _parse(lines: Iterator[str]) -> Iterator[bodies.EventBody]:
    """Parse the subset of server-sent events that ckptd uses."""
    fields: dict[str, Any] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
            continue
        if kind := fields.get("event"):
            id = int(fields["id"])
            if kind in (bodies.OPEN, bodies.GAP):
                yield bodies.EventBody(id=id, kind=kind)
            else:
                yield decode_json(fields["data"], bodies.EventBody)
        fields = {}
