"""The HTTP client of ckptd: a Source, plus the operations that only a daemon offers. One method per endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from urllib.parse import quote

import httpx

from ckptapi import bodies
from ckptapi.operations import Operations
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject
from ckptstore.format.statistics import SideDocument
from ckptstore.names import Attempt, Reference, check_ulid
from ckptstore.stores import PARALLEL_READS, ObjectReader, RangeReader

_ANSWER_S = 60.0


class DaemonClient(Operations):
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
        """All checkpoints of a run, newest step first; reads every page."""
        return list(self._pages(run))

    def candidates(self, run: str) -> Iterator[Checkpoint]:
        """The checkpoints that a restore tries, newest first. Corrupt ones are included for the report only."""
        return (c for c in self._pages(run) if c.state in (State.COMMITTED, State.CORRUPT))

    def latest(self, run: str | None = None) -> Checkpoint:
        """The newest checkpoint of a run, or of the only run. Raises InvalidRequest if there are several."""
        query = {"run": run} if run is not None else {}
        return self._json("GET", bodies.LATEST, bodies.CheckpointBody, params=query).checkpoint()

    def find(self, reference: Reference) -> Checkpoint:
        """The checkpoint that a reference names."""
        if reference.step is None:
            return self.latest(reference.run)
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
        try:
            with self._http.stream("GET", path, headers=headers) as response:
                self._raise_for(response)
                for part in response.iter_bytes(1 << 20):
                    buffer[done : done + len(part)] = part[: len(buffer) - done]
                    done += len(part)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        if done != len(buffer):
            raise CorruptObject(f"{self.url}{path} returned {done} bytes instead of {len(buffer)}")

    def take_lease(self, checkpoint: Checkpoint, holder: str, ttl_s: float) -> str:
        """Protect a checkpoint from deletion for `ttl_s` seconds."""
        request = bodies.LeaseRequest(id=checkpoint.id, holder=holder, ttl_s=ttl_s)
        # A retry after a lost response may create a second lease, which expires by itself.
        return self._patiently(partial(self._json, "POST", bodies.LEASES, bodies.LeaseBody, body=request)).lease

    def release_lease(self, run: str, lease: str) -> None:
        """End a lease."""
        self._request("DELETE", f"{bodies.LEASES}/{quote(run, safe='')}/{quote(lease, safe='')}")

    # Operations that only a daemon offers

    def run_summaries(self) -> list[bodies.RunBody]:
        """All runs with their sizes and newest checkpoints."""
        return self._json("GET", bodies.RUNS, bodies.RunsBody).items

    def run_summary(self, run: str) -> bodies.RunBody:
        """One run with its size, and its newest checkpoint. Raises NoCheckpoint."""
        return self._json("GET", f"{bodies.RUNS}/{quote(run, safe='')}", bodies.RunBody)

    def page(self, run: str | None = None, limit: int = 100, cursor: str | None = None) -> bodies.Page:
        """One page of a listing, by run, newest step first."""
        query: dict[str, str | int] = {"limit": limit}
        if run is not None:
            query["run"] = run
        if cursor is not None:
            query["cursor"] = cursor
        return self._json("GET", bodies.CHECKPOINTS, bodies.Page, params=query)

    def notify(self, run: str, attempt: Attempt) -> None:
        """Notify the daemon of a committed attempt; it reads the outcome from the store."""
        self._request("POST", bodies.NOTIFY, body=bodies.NotifyRequest(run, str(attempt)))

    def preempt(self, run: str, grace_s: float, reason: str = "") -> bodies.EventBody:
        """Give notice to the trainers of a run that they will be killed in `grace_s` seconds; returns the event."""
        request = bodies.PreemptRequest(grace_s=grace_s, reason=reason)
        return self._json("POST", f"{bodies.RUNS}/{quote(run, safe='')}/preempt", bodies.EventBody, body=request)

    def decide(self, run: str, attempt: Attempt, proposal: bytes, tombstone: str | None = None) -> bytes:
        """Propose an outcome of an attempt, or the fate of a tombstone; returns the first proposal of any client.

        For stores that overwrite on create. The decision is in the daemon's store on return.
        """
        request = bodies.DecisionRequest(run=run, attempt=str(attempt), tombstone=tombstone, proposal=proposal.decode())
        return self._json("POST", bodies.DECISIONS, bodies.DecisionBody, body=request).document.encode()

    def decide_generation(self, run: str, number: int, proposal: bytes) -> bytes:
        """As `decide`, for the trainer that begins a generation."""
        request = bodies.DecisionRequest(run=run, generation=number, proposal=proposal.decode())
        return self._json("POST", bodies.DECISIONS, bodies.DecisionBody, body=request).document.encode()

    def reindex(self) -> bodies.ReindexBody:
        """Rebuild the daemon's index from the store."""
        return self._json("POST", bodies.REINDEX, bodies.ReindexBody, timeout=3600)

    # Tokens, for admins

    def tokens(self) -> list[bodies.TokenBody]:
        """All tokens, by name, without their secrets."""
        return self._json("GET", bodies.TOKENS, bodies.TokensBody).items

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

    def join_restore(
        self,
        run: str,
        key: str,
        world_size: int,
        rank: int,
        checkpoint: str | None = None,
        ttl_s: float = bodies.SILENCE_S,
        host: str = "",
    ) -> bodies.RestoreBody:
        """Join the restore that a job names `key`; all ranks get the same checkpoint, held by a lease until the end.

        A rank that needs the checkpoint for longer takes its own lease before it reports that it is restored.
        checkpoint: an id; None for the newest usable one. ttl_s: a rank that is silent for this time ends the session.
        host: of this rank, for display. Raises NoCheckpoint, or Conflict if the session has ended
        or the requests of the ranks differ.
        """
        request = bodies.RestoreRequest(
            run=run, key=key, world_size=world_size, rank=rank, checkpoint=checkpoint, ttl_s=ttl_s, host=host
        )
        return self._json("POST", bodies.RESTORES, bodies.RestoreBody, body=request)

    def report_restore(
        self, id: str, rank: int, phase: bodies.Phase, done_bytes: int = 0, total_bytes: int = 0, problem: str = ""
    ) -> bodies.RestoreStatus:
        """Report the progress of a rank; returns the state of the session, and why it ended. Raises NotFound."""
        report = bodies.RankReport(phase=phase, done_bytes=done_bytes, total_bytes=total_bytes, problem=problem)
        return self._json("PUT", f"{_restore_path(id)}/ranks/{rank}", bodies.RestoreStatus, body=report)

    def restore_session(self, id: str, wait_s: float = 0, ranks: bool = True) -> bodies.RestoreBody:
        """One session. Returns when it has ended, or after `wait_s` (bodies.MAX_WAIT_S at most). Raises NotFound.

        ranks: list them and detect stragglers; for a few callers, not for each of thousands of ranks.
        """
        query: dict[str, str | int] = {"wait": str(wait_s), "ranks": str(ranks).lower()}
        timeout = wait_s + _ANSWER_S
        return self._json("GET", _restore_path(id), bodies.RestoreBody, params=query, timeout=timeout)

    def restore_sessions(self, run: str | None = None, limit: int = 100) -> list[bodies.RestoreBody]:
        """Sessions of one run or all runs, newest first, without their ranks."""
        query: dict[str, str | int] = {"limit": limit} if run is None else {"limit": limit, "run": run}
        return self._json("GET", bodies.RESTORES, bodies.RestoresBody, params=query).items

    def cancel_restore(self, id: str) -> bodies.RestoreBody:
        """End a session and release its lease. A session that has ended is not changed. Raises NotFound."""
        return self._json("DELETE", _restore_path(id), bodies.RestoreBody)

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


def _restore_path(id: str) -> str:
    return f"{bodies.RESTORES}/{check_ulid(id)}"
