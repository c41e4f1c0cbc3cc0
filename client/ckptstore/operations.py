"""What operators ask a daemon: events, jobs, live uploads, the probe; and reads of many ranges at once."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from ckptstore import wire
from ckptstore.catalog import Checkpoint
from ckptstore.connection import Connection
from ckptstore.decoding import decode_json
from ckptstore.errors import CorruptObject, DaemonUnavailable
from ckptstore.names import check_ulid

_SILENCE_S = 60.0
"""A stream of events says something every quarter of it."""
_PART_BYTES = 1 << 20
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Fill:
    """Stored bytes of a shard, and where they are to go."""

    shard: str
    offset: int
    buffer: memoryview


class Operations(Connection):
    """A part of DaemonClient. One method per endpoint."""

    def events(self, after: int = 0, run: str | None = None, limit: int = 100) -> wire.EventsBody:
        """Events after an id, oldest first."""
        query: dict[str, str | int] = {"after": after, "limit": limit} | ({"run": run} if run is not None else {})
        return self._json("GET", wire.EVENTS, wire.EventsBody, params=query)

    def event_stream(self, after: int | None = None, run: str | None = None) -> Iterator[wire.EventBody]:
        """Events as they happen, after an id or from now on; ends when the daemon leaves.

        The first one is of kind wire.OPEN: its id is where the stream begins. One of kind wire.GAP says that events
        before the next one are not kept any more.
        """
        headers = {"Accept": wire.EVENT_STREAM} | ({"Last-Event-ID": str(after)} if after is not None else {})
        timeout = httpx.Timeout(_SILENCE_S, connect=5.0)
        query = {"run": run} if run is not None else {}
        try:
            with self._http.stream("GET", wire.EVENTS, params=query, headers=headers, timeout=timeout) as response:
                self._raise_for(response)
                yield from _parse(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        except (msgspec.DecodeError, ValueError) as error:
            raise DaemonUnavailable(f"{self.url} sent an event that is not ckptd's: {error}") from error

    def start_job(self, request: wire.JobRequest) -> wire.JobBody:
        """Start a job; it is written down on return."""
        return self._json("POST", wire.JOBS, wire.JobBody, body=request)

    def jobs(self, limit: int = 100) -> list[wire.JobBody]:
        """Jobs, newest first, without their logs."""
        return self._json("GET", wire.JOBS, wire.JobsBody, params={"limit": limit}).items

    def job(self, id: str) -> wire.JobBody:
        """One job, with the newest lines of its log. Raises InvalidName or NoJob."""
        return self._json("GET", f"{wire.JOBS}/{check_ulid(id)}", wire.JobBody)

    def cancel_job(self, id: str) -> wire.JobBody:
        """Ask a job to end. Raises InvalidName or NoJob."""
        return self._json("DELETE", f"{wire.JOBS}/{check_ulid(id)}", wire.JobBody)

    def attempts(self, run: str | None = None) -> list[wire.AttemptBody]:
        """Live uploads of one run or all, oldest first."""
        query = {"run": run} if run is not None else {}
        return self._json("GET", wire.ATTEMPTS, wire.AttemptsBody, params=query).items

    def probe(self) -> wire.ProbeBody:
        """Let the daemon examine its store."""
        return self._json("POST", wire.PROBE, wire.ProbeBody, timeout=300)

    def shards(self, checkpoint: Checkpoint) -> list[wire.ShardBody]:
        """The shards of a checkpoint, by rank."""
        return self._json("GET", f"{_path(checkpoint)}/shards", wire.ShardsBody).items

    def readiness(self) -> wire.ReadinessBody:
        """What the daemon needs, and whether it has it; also if it says that it is not ready."""
        try:
            response = self._http.get("/readyz")
            return decode_json(response.content, wire.ReadinessBody)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        except msgspec.DecodeError as error:
            raise DaemonUnavailable(f"{self.url} is not a ckptd: {error}", "Is this the daemon's URL?") from error

    def about(self) -> wire.AboutBody:
        """The daemon's version, and the moment by its clock as the answer left it."""
        response = self._request("GET", "/openapi.json")
        try:
            document = msgspec.json.decode(response.content)
            told = parsedate_to_datetime(response.headers["date"]).timestamp() if "date" in response.headers else None
            return wire.AboutBody(version=str(document["info"]["version"]), at=told)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise DaemonUnavailable(f"{self.url} is not a ckptd: {error}", "Is this the daemon's URL?") from error

    def read_ranges(self, checkpoint: Checkpoint, fills: Sequence[Fill]) -> None:
        """Fill buffers with stored bytes, unchecked, in one request; wire.MAX_RANGES at most.

        Raises CorruptObject if the answer ends early: then some of the buffers are not filled.
        """
        ranges = [wire.ByteRange(shard=fill.shard, offset=fill.offset, count=len(fill.buffer)) for fill in fills]
        content = msgspec.json.encode(wire.ReadRequest(ranges))
        headers = {"Content-Type": "application/json"}
        try:
            with self._http.stream("POST", f"{_path(checkpoint)}/read", content=content, headers=headers) as response:
                self._raise_for(response)
                _unframe(response.iter_bytes(_PART_BYTES), fills, f"{self.url}{_path(checkpoint)}/read")
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error


def _path(checkpoint: Checkpoint) -> str:
    return f"{wire.CHECKPOINTS}/{quote(checkpoint.id, safe='@')}"


def _unframe(parts: Iterator[bytes], fills: Sequence[Fill], url: str) -> None:
    """Deal out bytes: for each range its length, then its content."""
    rest = memoryview(b"")

    def take(into: memoryview) -> None:
        nonlocal rest
        done = 0
        while done < len(into):
            if not rest:
                rest = memoryview(next(parts, b""))
                if not rest:
                    raise CorruptObject(f"{url} ended early")
            count = min(len(rest), len(into) - done)
            into[done : done + count] = rest[:count]
            rest = rest[count:]
            done += count

    for fill in fills:
        length = bytearray(_LENGTH.size)
        take(memoryview(length))
        if _LENGTH.unpack(length) != (len(fill.buffer),):
            raise CorruptObject(f"{url} gave {_LENGTH.unpack(length)[0]} bytes, {len(fill.buffer)} were asked for")
        take(fill.buffer)


def _parse(lines: Iterator[str]) -> Iterator[wire.EventBody]:
    """Server-sent events, as far as ckptd uses them."""
    fields: dict[str, Any] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif kind := fields.get("event"):
            id = int(fields["id"])
            if kind in (wire.OPEN, wire.GAP):
                yield wire.EventBody(id=id, at=0.0, kind=kind)
            else:
                yield decode_json(fields["data"], wire.EventBody)
            fields = {}
        else:
            fields = {}
