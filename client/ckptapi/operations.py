"""Operator endpoints of a daemon: retention, events, jobs, live uploads, the probe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ckptapi import bodies
from ckptapi.connection import Connection
from ckptstore.analysis.goodput import Account
from ckptstore.commits.audit import AuditEntry
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.labels import LabelChange
from ckptstore.errors import DaemonUnavailable, InvalidRequest, PartlyDone, error_from_code
from ckptstore.format.decoding import convert, decode_json
from ckptstore.format.records import PolicySet
from ckptstore.names import Reference, check_pin, check_ulid
from ckptstore.reading.fetch import Progress
from ckptstore.retention.deletion import CollectReport, Deleted
from ckptstore.retention.pins import NamedPin
from ckptstore.retention.policy import PoliciesInForce
from ckptstore.retention.pruning import Prune, PrunePlan
from ckptstore.stores.checks import StoreReport

_SILENCE_S = 60.0
"""Read timeout of an event stream; the daemon sends a comment every quarter of it."""
_JOB_POLL_S = 0.5


class Operations(Connection):
    """A part of DaemonClient. One method per endpoint."""

    # Retention. The audit log records the name of the caller's token.

    def delete(self, checkpoint: Checkpoint, grace_s: float, reason: str = "", force: bool = False) -> None:
        """Hide a checkpoint, delete it after the grace; durable on return.

        force: even if it is the newest one of its run. Raises NoCheckpoint or CheckpointHeld.
        """
        params: dict[str, str | int] = {"grace_s": str(grace_s), "reason": reason}
        if force:
            params["force"] = "true"
        self._request("DELETE", _path(checkpoint), params=params)

    def undelete(self, reference: Reference, reason: str = "") -> Checkpoint:
        """Undo a deletion; listed, and pinned as `undeleted`, on return. Raises NoCheckpoint or SweepBegun."""
        path = f"{bodies.CHECKPOINTS}/{quote(str(reference), safe='@')}/undelete"
        return self._json("POST", path, bodies.CheckpointBody, body=bodies.UndeleteRequest(reason)).checkpoint()

    def deleted(self, run: str) -> list[Deleted]:
        """Deleted checkpoints of a run that can be undeleted, newest step first."""
        return self._json("GET", bodies.DELETED, bodies.DeletedListBody, params={"run": run}).items

    def pin(self, checkpoint: Checkpoint, name: str, reason: str = "") -> None:
        """Keep a checkpoint until the pin is removed; durable on return. Raises InvalidName or NoCheckpoint."""
        self._request("PUT", f"{_path(checkpoint)}/pins/{check_pin(name)}", params={"reason": reason})

    def unpin(self, checkpoint: Checkpoint, name: str) -> None:
        """Remove a pin; a missing pin is ignored. Raises InvalidName or NoCheckpoint."""
        self._request("DELETE", f"{_path(checkpoint)}/pins/{check_pin(name)}")

    def label(self, checkpoint: Checkpoint, change: LabelChange, reason: str = "") -> Checkpoint:
        """Change tags and metrics; durable on return. Raises InvalidRequest or NoCheckpoint."""
        body = bodies.LabelsRequest(tags=dict(change.tags), metrics=dict(change.metrics), reason=reason)
        return self._json("PATCH", _path(checkpoint), bodies.CheckpointBody, body=body).checkpoint()

    def pins(self, run: str) -> list[NamedPin]:
        """All pins of a run, newest step first."""
        return self._json("GET", bodies.PINS, bodies.PinsBody, params={"run": run}).items

    def audit(self, run: str, limit: int = 100) -> list[AuditEntry]:
        """The audit log of a run, newest first; bodies.MAX_PAGE records at most."""
        query: dict[str, str | int] = {"run": run, "limit": limit}
        return self._json("GET", bodies.AUDIT, bodies.AuditListBody, params=query).items

    def policies(self) -> PoliciesInForce:
        """The policies in force; version 0 if they were never set."""
        return self._json("GET", bodies.POLICIES, PoliciesInForce)

    def policies_history(self, limit: int = 100) -> list[PoliciesInForce]:
        """The versions of the policies, newest first; bodies.MAX_PAGE at most."""
        return self._json("GET", f"{bodies.POLICIES}/history", bodies.PoliciesListBody, params={"limit": limit}).items

    def change_policies(self, policies: PolicySet, expected: int, reason: str = "") -> PoliciesInForce:
        """Put policies in force in place of version `expected`. Raises InvalidRequest or Conflict."""
        request = bodies.PoliciesRequest(expected=expected, policies=policies, reason=reason)
        return self._json("PUT", bodies.POLICIES, PoliciesInForce, body=request)

    def plan_prune(self, prune: Prune) -> PrunePlan:
        """What a prune would delete and what would stay, and why. Raises NoCheckpoint or InvalidRequest."""
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
        query: dict[str, str | int] = {"after": after, "limit": limit} | ({"run": run} if run is not None else {})
        return self._json("GET", bodies.EVENTS, bodies.EventsBody, params=query)

    def event_stream(self, after: int | None = None, run: str | None = None) -> Iterator[bodies.EventBody]:
        """Events as they happen, after an id or from now on.

        Ends when the daemon shuts down, or when the token becomes invalid.
        The first one is of kind bodies.OPEN: its id is the start of the stream. One of kind bodies.GAP means that
        events before the next one were deleted.
        """
        headers = {"Accept": bodies.EVENT_STREAM} | ({"Last-Event-ID": str(after)} if after is not None else {})
        timeout = httpx.Timeout(_SILENCE_S, connect=5.0)
        query = {"run": run} if run is not None else {}
        try:
            with self._http.stream("GET", bodies.EVENTS, params=query, headers=headers, timeout=timeout) as response:
                self._raise_for(response)
                yield from _parse(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
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
        return self._json("GET", bodies.JOBS, bodies.JobsBody, params={"limit": limit}).items

    def job(self, id: str) -> bodies.JobBody:
        """One job, with the last lines of its log. Raises InvalidName or NotFound."""
        return self._json("GET", f"{bodies.JOBS}/{check_ulid(id)}", bodies.JobBody)

    def cancel_job(self, id: str) -> bodies.JobBody:
        """Cancel a job. Raises InvalidName or NotFound."""
        return self._json("DELETE", f"{bodies.JOBS}/{check_ulid(id)}", bodies.JobBody)

    def attempts(self, run: str | None = None) -> list[bodies.AttemptBody]:
        """Live uploads of one run or all runs, oldest first."""
        query = {"run": run} if run is not None else {}
        return self._json("GET", bodies.ATTEMPTS, bodies.AttemptsBody, params=query).items

    def goodput(self, run: str) -> Account:
        """What became of the time of a run. Raises NoCheckpoint if nothing is known of it."""
        return self._json("GET", bodies.GOODPUT, Account, params={"run": run})

    def probe(self) -> StoreReport:
        """Run the daemon's check of its store."""
        return self._json("POST", bodies.PROBE, StoreReport, timeout=300)

    def shards(self, checkpoint: Checkpoint) -> list[bodies.ShardBody]:
        """The shards of a checkpoint, by rank."""
        return self._json("GET", f"{_path(checkpoint)}/shards", bodies.ShardsBody).items

    def readiness(self) -> bodies.ReadinessBody:
        """The readiness of the daemon, also if it is not ready."""
        try:
            response = self._http.get("/readyz")
            return decode_json(response.content, bodies.ReadinessBody)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
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


def _path(checkpoint: Checkpoint) -> str:
    return f"{bodies.CHECKPOINTS}/{quote(checkpoint.id, safe='@')}"


def _parse(lines: Iterator[str]) -> Iterator[bodies.EventBody]:
    """Parse the subset of server-sent events that ckptd uses."""
    fields: dict[str, Any] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif kind := fields.get("event"):
            id = int(fields["id"])
            if kind in (bodies.OPEN, bodies.GAP):
                yield bodies.EventBody(id=id, at=0.0, kind=kind)
            else:
                yield decode_json(fields["data"], bodies.EventBody)
            fields = {}
        else:
            fields = {}
