"""Records what real code does to a store, in the words of the tables, and checks that a table allows it.

A trace is one process's operations. Each of its writes must be the next write of the table. A row that reads must be
matched by a read of at least the same objects, with a reply that leads on; other reads are allowed anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing, StoreUnavailable
from ckptstore.names import THINNED, is_optimizer_shard, is_thinning, receipt_rank
from ckptstore.stores import ObjectInfo, ObjectWriter, Store
from ckptstore.stores.base import WrappedStore
from tests.protocol.table import Key, Op, Program, Row, Value, Verb

KINDS = ("commits", "attempts", "tombstones", "fates", "leases", "pins", "references", "dead")
APART = {"tombstones": "thinnings", "references": "optimizer references"}
"""Folders with two kinds of objects, and the second one."""
_T = TypeVar("_T")
_WRITES = ("put", "create", "delete")


@dataclass(frozen=True)
class Event:
    """One operation. found: the objects that a get or list returned."""

    verb: Verb
    key: Key
    value: Value = ""
    reply: str = ""
    found: dict[Key, Value] = field(default_factory=dict)


class Names:
    """The names of real attempts and tombstones in the tables: a, b, ... and t, u, ..., in order of appearance."""

    def __init__(self, leases: str = "l") -> None:
        self._attempts: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._leases = leases

    def attempt(self, name: str) -> str:
        return self._attempts.setdefault(name, "abcdef"[len(self._attempts)])

    def key(self, key: str, data: bytes | None = None) -> Key | None:
        """The model's name of an object of a run; None if the model lacks such objects."""
        _, kind, *rest = key.removesuffix(".json").split("/")
        if kind not in KINDS or not rest or not rest[0]:
            return (kind,) if kind in KINDS else None
        if kind == "leases":
            return (kind, self.attempt(json.loads(data.split(b"\n")[0])["attempt"]), self._leases) if data else None
        name, _, other = rest[0].partition(".")
        if kind == "dead":
            return (kind, str(int(other)))
        a = self.attempt(name)
        if kind == "tombstones" and is_thinning(other):
            kind = "thinnings"
        elif kind == "references" and other.endswith(".optimizer"):
            kind, other = "optimizer references", other.removesuffix(".optimizer")
        if other == THINNED:
            return (kind, a, other)
        if kind == "attempts":
            return (kind, a, self._part(key)) if rest[1:] and rest[1] else (kind, a)
        if kind in ("tombstones", "thinnings", "fates"):
            other = self._ids.setdefault(other, "tuvwxyz"[len(self._ids)])
        elif kind.endswith("references"):
            other = self.attempt(other)
        return (kind, a, other) if other else (kind, a)

    def value(self, key: Key, data: bytes) -> Value:
        """The value that the tables give to an object."""
        if key[0] not in ("commits", "fates", "leases", "dead"):
            return ""
        document = json.loads(data.split(b"\n")[0])
        if key[0] == "commits":
            return "committed" if document["committed"] else "aborted"
        if key[0] == "dead":
            return tuple(sorted(map(self.attempt, document["attempts"])))
        return "live" if key[0] == "leases" else "swept" if document["swept"] else "taken back"

    @staticmethod
    def _part(key: str) -> str:
        rank = receipt_rank(key)
        if rank is not None:
            return f"receipt {rank}"
        last = key.rsplit("/", 1)[-1]
        kind = "optimizer" if is_optimizer_shard(last) else "shard"
        return f"{kind} {int(last[6:11])}" if last.startswith("shard") else "manifest"


class RecordingStore(WrappedStore):
    """Another store; what one process does is recorded in `trace`."""

    def __init__(self, store: Store, names: Names) -> None:
        super().__init__(store)
        self._names = names
        self.trace: list[Event] = []
        self._leases: dict[str, Key] = {}

    def put(self, key: str, data: Buffer) -> None:
        self._write("put", key, bytes(data), lambda: self._store.put(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        return self._write("create", key, bytes(data), lambda: self._store.put_if_absent(key, data))

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return _RecordingWriter(self._store.open_writer(key, size_hint), self, key)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._write("delete", key, b"", lambda key=key: self._store.delete_many([key]))  # type: ignore[misc]

    def get(self, key: str) -> bytes:
        try:
            data = self._store.get(key)
        except ObjectMissing:
            if (name := self._names.key(key)) is not None:
                self.trace.append(Event("get", name))
            raise
        except StoreUnavailable:
            if (name := self._names.key(key)) is not None:
                self.trace.append(Event("get", name, reply="unknown"))
            raise
        if (name := self._names.key(key, data)) is not None:
            self.trace.append(Event("get", name, found={name: self._names.value(name, data)}))
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        listed = [*self._store.list(prefix)]
        found: dict[Key, Value] = {}
        for info in listed:
            document = b"" if "/attempts/" in info.key else self._store.get(info.key)
            if (name := self._names.key(info.key, document)) is not None:
                found[name] = self._names.value(name, document)
        if (name := self._names.key(prefix)) is not None:
            self.trace.append(Event("list", name, found=found))
            if name[0] in APART:  # one listing shows both
                self.trace.append(Event("list", (APART[name[0]], *name[1:]), found=found))
        return iter(listed)

    def list_folders(self, prefix: str) -> Iterator[str]:
        listed, kind = [*self._store.list_folders(prefix)], self._names.key(prefix)
        if kind is not None:
            found: dict[Key, Value] = {(*kind, self._names.attempt(name)): "" for name in listed}
            self.trace.append(Event("list", kind, found=found))
        return iter(listed)

    def _write(self, verb: Verb, key: str, data: bytes, call: Callable[[], _T]) -> _T:
        name = self._lease(key, data) if "/leases/" in key else self._names.key(key, data)
        value = self._names.value(name, data) if name is not None and verb != "delete" else ""
        reply = "unknown"
        try:
            result = call()
            reply = "ok" if verb != "create" else "won" if result else "exists"
        finally:
            if name is not None:
                self.trace.append(Event(verb, name, value, reply))
        return result

    def _lease(self, key: str, data: bytes) -> Key | None:
        """The name of a lease does not contain the attempt, its document does."""
        name = self._names.key(key, data)
        return self._leases.setdefault(key, name) if name is not None else self._leases.get(key)


class _RecordingWriter(ObjectWriter):
    def __init__(self, writer: ObjectWriter, store: RecordingStore, key: str) -> None:
        self._writer = writer
        self._recording = store
        self._key = key

    def write(self, data: Buffer) -> None:
        self._writer.write(data)

    def commit(self) -> None:
        self._recording._write("put", self._key, b"", self._writer.commit)

    def abort(self) -> None:
        self._writer.abort()


def accepts(program: Program, trace: Sequence[Event], crashed: bool = False) -> str | None:
    """None if the table allows the trace, or the first event that it does not allow.

    Writes of objects that the table never writes belong to another actor in the same process. crashed: the trace may
    end at any row.
    """
    own = {row.op.key for row in program.rows.values() if row.op is not None and row.op.verb in _WRITES}
    places = _silent(program, {program.start})
    for number, event in enumerate(trace):
        after = {goes for at in places for goes in _follow(program[at], event)}
        if event.verb not in _WRITES:
            after |= places  # a read that this row does not need
        elif event.key not in own:
            continue
        if not after:
            return f"event {number}, {event}, at one of the rows {sorted(places)}"
        places = _silent(program, after)
    if crashed or any(program[at].op is None for at in places):
        return None
    return f"the trace ends at one of the rows {sorted(places)}"


def _follow(row: Row, event: Event) -> Iterator[str]:
    """The next row, if the event is what this row does."""
    op = row.op
    if op is None:
        return
    if op.verb in _WRITES:
        same = (op.verb, op.key) == (event.verb, event.key) and (op.verb == "delete" or op.value == event.value)
        if same:
            yield row.then.get(event.reply) or (row.at if event.reply == "unknown" else row.then["else_"])
    elif event.verb not in _WRITES and op.key[: len(event.key)] == event.key:
        if op.verb == "list" and event.verb == "get":
            return
        found = {key: value for key, value in event.found.items() if key[: len(op.key)] == op.key}
        reply = event.reply or (op.classify(found) if op.verb == "list" else _get(op, found))
        goes = row.then.get(reply) or ("" if reply == "unknown" else row.then.get("else_"))
        if goes:
            yield goes


def _get(op: Op, found: dict[Key, Value]) -> str:
    return str(found[op.key]) if op.key in found else "absent"


def _silent(program: Program, places: set[str]) -> set[str]:
    """With the rows that are reached without an operation: a deletion of what is not there is skipped."""
    found, todo = set(places), list(places)
    while todo:
        row = program[todo.pop()]
        skipped = row.op is not None and row.op.verb == "delete" and row.op.key[0] in ("attempts", "references")
        if row.op is not None and (row.op.verb == "begin" or skipped):
            goes = row.then.get("ok") or row.then["else_"]
            if goes not in found:
                found.add(goes)
                todo.append(goes)
    return found
