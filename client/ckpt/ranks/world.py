"""This process among the ranks that save and restore together. A single process is a world of size 1.

Ranks exchange values through the key-value store of the job, not through collectives: it works with any backend, does
not use a GPU, and lost ranks can be named. The training thread calls nothing here after the first save.

The store may be older than the job's processes: torchrun starts killed workers again on the store of its agent, where
the values of the killed ones still are. So rank 0 chooses a prefix that no life before had. Another rank sets a number
of its own and waits until rank 0 has answered just this number with the prefix: each number has its own answer.

A job without torch uses the store of `jax.distributed`. JAX has no public interface to it; what is used of its private
one is pinned by tests/arrays/test_jax_pins.py.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar, cast

import msgspec
from xxhash import xxh3_64_hexdigest, xxh3_128_digest

from ckpt.config import Group
from ckpt.lazily import torch, torch_loaded
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, InvalidRequest, RankLost, SaveFailed, error_from_code
from ckptstore.names import new_ulid
from ckptstore.retry import pauses
from ckptstore.threads import start_daemon

logger = logging.getLogger(__name__)

_LONGEST_POLL_S = 0.25
_NOT_FOUND = "NOT_FOUND"
_PATIENCE_MS = 60_000


@dataclass(frozen=True)
class JaxStore:
    """Keys below a prefix. For any thread. Raises ConnectionError if the coordinator does not answer."""

    client: Any
    _prefix: str = ""

    def below(self, prefix: str) -> JaxStore:
        """The same store with a longer prefix."""
        return JaxStore(self.client, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, or replace it."""
        data = value.encode() if isinstance(value, str) else value
        self._ask(self.client.key_value_set_bytes, self._prefix + key, data, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return bytes(self._ask(self.client.blocking_key_value_get_bytes, self._prefix + key, _PATIENCE_MS))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have values."""
        return all(self._find(key) is not None for key in keys)

    def delete_key(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._ask(self.client.key_value_delete, self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; returns the sum."""
        return int(self._ask(self.client.key_value_increment, self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is as expected; returns the value there is then.

        Not atomic: of two processes that do so at the same time, either may win.
        """
        if (found := self._find(key)) is not None and found != expected.encode():
            return found
        self.set(key, desired)
        return desired.encode()

    def _find(self, key: str) -> bytes | None:
        try:
            return bytes(self.client.key_value_try_get_bytes(self._prefix + key))
        except RuntimeError as error:  # JaxRuntimeError is one, and has no code
            if str(error).startswith(_NOT_FOUND):
                return None
            raise ConnectionError(str(error)) from error

    def _ask(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


def jax_job() -> tuple[int, int, Any] | None:
    """This process's number, the number of processes, and the client of the coordinator; None outside of a job."""
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    if state is None or state.client is None:
        return None
    return state.process_id, state.num_processes, state.client


def _polls() -> Iterator[float]:
    """Pauses between looks: what one waits for is noticed late by a fifth of the wait at most."""
    return pauses(0.001, _LONGEST_POLL_S, factor=1.2, jitter=False)


Ask = Callable[..., Any]
"""Calls a method of a store. Raises RankLost if the store is gone."""


def prefixed(prefix: str, store: Any) -> Any:
    """Another store, with this prefix before its keys."""
    if isinstance(store, JaxStore):
        return store.below(prefix)
    return torch.distributed.distributed_c10d.PrefixStore(prefix, store)


class RendezvousHost:
    """Rank 0: answers the other ranks from a thread of its own, until all have joined."""

    def __init__(self, store: Any, size: int, ask: Ask) -> None:
        self._store = store
        self._ask = ask
        self._prefix = new_ulid(system_clock())
        self._answered = dict.fromkeys(range(1, size), "")
        """The number that was answered last, by rank that has not joined yet."""
        self._stop = threading.Event()
        self._thread = start_daemon("ckpt-join", self._run)

    @property
    def joined(self) -> Any:
        """The store for this life."""
        return prefixed(self._prefix, self._store)

    def close(self) -> None:
        """Answer no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        waits = _polls()
        try:
            while self._answered and not self._stop.wait(next(waits)):
                self._ask(self._answer_all)
        except RankLost:
            logger.debug("the store of the process group is gone", exc_info=True)

    def _answer_all(self) -> None:
        store = self._store
        for rank, answered in list(self._answered.items()):
            if store.check([f"{self._prefix}/joined/{rank}"]):
                del self._answered[rank]
            elif store.check([f"join/{rank}"]) and (number := bytes(store.get(f"join/{rank}")).decode()) != answered:
                self._answered[rank] = number
                store.set(f"reply/{number}", self._prefix)


_BEAT_S = 1.0

_T = TypeVar("_T")


@dataclass(slots=True)
class _Meetings:
    """The exchanges of one group so far. The counts are equal on all of its ranks, so their keys are equal."""

    store: Any
    """The store of the job, with a prefix for the group. It may hold values of an earlier life of the job."""
    joined: Any = None
    """The store for this life; None before the first exchange."""
    joining: threading.Lock = field(default_factory=threading.Lock)
    host: RendezvousHost | None = None
    count: int = 0
    answer: Sequence[str] = ()
    """The key of rank 0's last answer."""
    group: Any = None

    @classmethod
    def of(cls, members: tuple[int, ...], whole: bool) -> _Meetings:
        """The meetings of these global ranks. whole: they are all."""
        global _default_store
        if is_grouped():
            store: Any = torch.distributed.distributed_c10d._get_default_store()
        else:
            job = jax_job()
            assert job is not None
            store = JaxStore(job[2])
        if store != _default_store:
            _meetings.clear()
            _default_store = store
        if members not in _meetings:
            name = "all" if whole else xxh3_64_hexdigest(repr(members).encode())
            _meetings[members] = cls(prefixed(f"ckpt/{name}", store))
        return _meetings[members]


_default_store: Any = None
_meetings: dict[tuple[int, ...], _Meetings] = {}
"""By global ranks. Process-wide, like process groups: all Worlds of the same ranks share theirs."""


class World:
    """The processes that save and restore together. One thread calls the collectives; any thread may call `beat`.

    Ranks are numbered within the group, in the order of their global ranks.
    """

    def __init__(self, timeout_s: float, group: Group = "all") -> None:
        """timeout_s: a rank without a heartbeat for this long is lost. group: see Config.

        Raises InvalidRequest for a group that is gone, or that this process is not in.
        """
        own, everyone = _place()
        self.members = _members(group, own, everyone)
        """The global ranks of the group, by rank."""
        self.whole = len(self.members) == everyone
        """Whether the group has all processes of the job."""
        self.rank: int = self.members.index(own)
        self.global_rank = own
        """The number of this process in the job, which messages name."""
        self.size: int = len(self.members)
        # A lost rank may stall an exchange and then the meeting after it: both must fit into the timeout.
        self._silence_s, self.exchange_s = 0.6 * timeout_s, 0.25 * timeout_s
        self._beat_s = min(_BEAT_S, self._silence_s / 4)
        self._beating = threading.Lock()
        self._beats = 0
        self._last_beat = 0.0
        self._meetings = _Meetings.of(self.members, self.whole) if self.size > 1 else _Meetings(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (JSON types and bytes), on every rank, by rank. Raises RankLost."""
        found: list[Any] = self.decide(value, list)
        return found

    def decide(self, value: Any, decide: Callable[[list[Any]], Any]) -> Any:
        """Rank 0's result from every rank's value, on every rank: one meeting instead of a gather and a broadcast.

        value, and what `decide` returns: JSON types and bytes. decide: called on rank 0 only, while the others wait; it
        must not raise, and sends heartbeats if it takes long. Raises RankLost.
        """
        if self.size == 1:
            return decide([value])
        key = self._next_key()
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._set(keys[self.rank], [value])
        wait = _Wait(keys)
        if self.rank:
            return self._answer(key, wait)
        try:
            self._wait_for(dict(enumerate(keys)), wait)
        except RankLost as error:
            self._set(key, [None, error.message, error.hint])
            if self._meetings.host is not None:
                self._meetings.host.close()
            # The store may end with this process: first let the other ranks read which rank is lost.
            time.sleep(2 * _LONGEST_POLL_S)
            raise
        store = self._store
        values = self._ask(lambda: [bytes(store.get(key)) for key in keys])
        decided = decide([msgspec.msgpack.decode(data)[0] for data in values])
        # All ranks have reached this meeting, and so have read the answer of the one before.
        answer, read, self._meetings.answer = msgspec.msgpack.encode([decided]), [*self._meetings.answer, *keys], [key]
        self._ask(lambda: [store.set(key, answer), *map(store.delete_key, read)])
        return decided

    def gather_alike(self, value: bytes) -> dict[bytes, tuple[int, ...]]:
        """The distinct values of all ranks, each with its ranks; an equal value is sent once. Raises RankLost."""
        saying: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(self.gather(xxh3_128_digest(value))):
            saying.setdefault(digest, []).append(rank)
        first = {ranks[0] for ranks in saying.values()}
        values = self.gather(value if self.rank in first else None)
        return {values[ranks[0]]: tuple(ranks) for ranks in saying.values()}

    def beat(self) -> None:
        """Send a heartbeat to the ranks that wait for this one. Cheap, because it is rate-limited. Raises RankLost."""
        with self._beating:
            now = time.monotonic()
            if self.size == 1 or now - self._last_beat < self._beat_s:
                return
            self._last_beat = now
            self._beats += 1
        self._ask(self._store.set, f"beat/{self.rank}", str(self._beats))

    def private_store(self) -> Any:
        """A key-value store that all ranks share, with a prefix of its own. All ranks must call this in the same order.

        Only for threads that may block: the calls of the store have no timeout."""
        return prefixed(f"private/{self._next_key()}", self._store)

    def exchange_group(self) -> torch.distributed.ProcessGroup:
        """A gloo process group that exchanges bytes in host memory. The first call creates it, and is a collective."""
        meetings = self._meetings
        if meetings.group is None:
            # Without the barrier of all processes, of which some may not be in this group.
            meetings.group = torch.distributed.new_group(
                list(self.members),
                timeout=timedelta(seconds=self.exchange_s),
                backend="gloo",
                use_local_synchronization=not self.whole,
            )
        group: torch.distributed.ProcessGroup = meetings.group
        return group

    def watch_collectives(self) -> Callable[[], AbstractContextManager[None]]:
        """The returned function is called around each collective of the exchange group: if it takes long, a log line
        names the ranks that this one waits for. All ranks must call both in the same order.

        A collective has no keys that say which ranks have come: a thread sets one after two seconds.
        """
        key, numbers = self._next_key(), count()

        def watch(number: int, ended: threading.Event) -> None:
            try:
                if ended.wait(_HERE_S):
                    return
                self._set(f"{key}/{number}/{self.rank}", None)
                if not ended.wait(NOTICE_S - _HERE_S):
                    self._log_wait(_Wait([f"{key}/{number}/{rank}" for rank in range(self.size)]))
            except RankLost:
                logger.debug("the store of the process group is gone", exc_info=True)

        @contextmanager
        def under_way() -> Iterator[None]:
            ended = threading.Event()
            start_daemon("ckpt-notice", watch, next(numbers), ended)
            try:
                yield
            finally:
                ended.set()

        return under_way

    def apart(self, name: str | None = None) -> World:
        """The same ranks, for meetings of this name; ranks that do not come stay in step with the others. After two
        minutes they are lost. None: a new name; then all ranks must call this in the same order."""
        found = copy(self)
        if self.size > 1:
            store = prefixed(f"apart/{name or self._next_key()}", self._store)
            found._meetings, found._last_beat = _Meetings(store, store), 0.0
            found._silence_s = min(self._silence_s, _APART_S)
        return found

    def names(self, *ranks: int) -> str:
        """Ranks in messages, by their global numbers: rank 1 of 4."""
        named = ", ".join(str(self.members[rank]) for rank in ranks)
        of = f"of {self.size}" if self.whole else f"of a group of {self.size}"
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {named} {of}"

    @property
    def _store(self) -> Any:
        """The store for this life of the job. The first use waits until this rank has joined. Raises RankLost."""
        meetings = self._meetings
        with meetings.joining:
            if meetings.joined is None:
                meetings.joined = self._join(meetings)
            return meetings.joined

    def _join(self, meetings: _Meetings) -> Any:
        if self.rank == 0:
            meetings.host = RendezvousHost(meetings.store, self.size, self._ask)
            return meetings.host.joined
        store, number, wait = meetings.store, new_ulid(system_clock()), _Wait(())
        self._ask(store.set, f"join/{self.rank}", number)
        waits = _polls()
        while not self._ask(store.check, [f"reply/{number}"]):
            waited = time.monotonic() - wait.since
            if waited > self._silence_s:
                raise self._silent(0)
            if waited > NOTICE_S and not wait.logged:
                wait.logged = True
                log_wait(self.global_rank, self.names(0))
            time.sleep(next(waits))
        prefix = bytes(self._ask(store.get, f"reply/{number}")).decode()
        self._ask(store.set, f"{prefix}/joined/{self.rank}", "")
        return prefixed(prefix, store)

    def _silent(self, rank: int) -> RankLost:
        return RankLost(
            f"{self.names(rank)} sent no heartbeat for {self._silence_s:.0f} s",
            "Look at that rank's log; restart the job, or raise peer_timeout_s if it was merely slow",
        )

    def _next_key(self) -> str:
        self._meetings.count += 1
        return str(self._meetings.count)

    def _set(self, key: str, value: Any) -> None:
        self._ask(self._store.set, key, msgspec.msgpack.encode(value))

    def _exist(self, *keys: str) -> bool:
        return bool(self._ask(self._store.check, list(keys)))

    def _answer(self, key: str, wait: _Wait) -> Any:
        self._wait_for({0: key}, wait)
        answer = msgspec.msgpack.decode(bytes(self._ask(self._store.get, key)))
        if len(answer) == 3:
            raise RankLost(answer[1], answer[2])
        return answer[0]

    def _wait_for(self, keys: Mapping[int, str], wait: _Wait) -> None:
        """Wait for the keys that ranks set. Raises RankLost if one that has not sends no heartbeat meanwhile."""
        beats: dict[int, tuple[bytes, float]] = {}
        look = time.monotonic() + self._beat_s / 2
        waits = _polls()
        # Store.wait would print a warning at each timeout.
        while not self._exist(*keys.values()):
            self.beat()
            now = time.monotonic()
            if now >= look:
                look = now + self._beat_s / 2
                self._check_beats(keys, beats, wait.since)
            if not wait.logged and now > wait.since + NOTICE_S:
                wait.logged = True
                self._log_wait(wait)
            time.sleep(next(waits))

    def _check_beats(self, keys: Mapping[int, str], beats: dict[int, tuple[bytes, float]], since: float) -> None:
        """Raise RankLost if the beat of a rank that has not set its key has not changed for too long.

        beats: the last one of each rank, and when it was new.
        """
        ranks = list(keys)
        for rank in (ranks[i] for i in absent(self._exist, list(keys.values()))):
            name = f"beat/{rank}"
            beat = bytes(self._ask(self._store.get, name)) if self._exist(name) else b""
            now = time.monotonic()
            last, new_at = beats.get(rank, (beat, since))
            beats[rank] = beat, new_at if beat == last else now
            if now > beats[rank][1] + self._silence_s:
                raise self._silent(rank)

    def _log_wait(self, wait: _Wait) -> None:
        if awaited := absent(self._exist, wait.keys):
            log_wait(self.global_rank, self.names(*awaited))

    def _ask(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The store's answer. Raises RankLost if the store is gone or does not answer: its calls have no timeout."""
        try:
            return call_with_timeout(self._silence_s, call, *arguments)
        except _network_errors() as error:
            raise RankLost(
                f"{self.names(self.rank)} lost the store of its process group: {str(error) or 'no answer'}",
                "The process that hosts it (rank 0 of the job, or torchrun's agent) is gone or hangs; restart the job",
            ) from error


def together(world: World, step: Callable[[], Any]) -> list[Any]:
    """The results of a step on all ranks (JSON types and bytes), by rank. A collective.

    Where the step fails on some ranks, each of them raises its own error. All others raise a CkptError that names the
    first of these ranks.
    """
    try:
        answer = [step()]
    except Exception as error:  # of any type: the other ranks wait for an answer
        failure = error if isinstance(error, CkptError) else SaveFailed(f"it failed with {error!r}")
        world.gather([failure.code, failure.message, failure.hint])
        raise
    answers = world.gather(answer)
    for rank, (first, *failure) in zip(world.members, answers, strict=True):
        if failure:
            message, hint = failure
            raise error_from_code(first, f"rank {rank}: {message}", hint)
    return [found for [found] in answers]


def is_grouped() -> bool:
    """Whether this process belongs to a process group of torch."""
    return torch_loaded() and torch.distributed.is_available() and torch.distributed.is_initialized()


def _place() -> tuple[int, int]:
    """This process's global rank, and the number of ranks: of torch's process group, or of JAX's processes."""
    if is_grouped():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    job = jax_job()
    return (0, 1) if job is None else job[:2]


def _network_errors() -> tuple[type[Exception], ...]:
    known: tuple[type[Exception], ...] = (TimeoutError, ConnectionError)
    return (*known, torch.distributed.DistNetworkError) if torch_loaded() else known


@dataclass(slots=True)
class _Wait:
    """One wait for other ranks, which is logged once."""

    keys: Sequence[str]
    """Each rank that comes sets its own."""
    since: float = field(default_factory=time.monotonic)
    logged: bool = False


def _members(group: Group, own: int, everyone: int) -> tuple[int, ...]:
    """The global ranks of a group, which this process is in."""
    if group == "solo":
        return (own,)
    if group == "all":
        return tuple(range(everyone))
    try:
        members = tuple(sorted(torch.distributed.get_process_group_ranks(cast(torch.distributed.ProcessGroup, group))))
    except (KeyError, ValueError) as error:
        raise InvalidRequest(
            "the process group of this Checkpointer does not exist",
            "Make the Checkpointer after the group, and close it before destroy_process_group()",
        ) from error
    if own not in members:
        raise InvalidRequest(
            f"rank {own} is not in the process group of this Checkpointer, whose ranks are {members}",
            "Make the Checkpointer only on the ranks of the group",
        )
    return members


_APART_S = 120.0
NOTICE_S = 10.0
"""A wait for other ranks is logged after this time."""
_HERE_S = 2.0
_NAMED = 8


def log_wait(rank: int, awaited: str) -> None:
    """Log for which ranks a rank waits."""
    message = "rank %d has waited %.0f s for %s; all ranks must make the same calls of ckpt"
    logger.warning(message, rank, NOTICE_S, awaited)


def absent(exist: Callable[..., bool], keys: Sequence[str]) -> list[int]:
    """Indices of keys that do not exist, at most a few, found in few requests. exist: whether all of some keys do."""
    found: list[int] = []
    todo = [range(len(keys))]
    while todo and len(found) < _NAMED:
        part = todo.pop()
        if exist(*(keys[i] for i in part)):
            continue
        if len(part) == 1:
            found.append(part[0])
        else:
            todo += [part[len(part) // 2 :], part[: len(part) // 2]]
    return found


def call_with_timeout(seconds: float, call: Callable[..., _T], *arguments: Any) -> _T:
    """The result or error of the call, in a thread of its own, which goes on after TimeoutError."""
    answer: Future[_T] = Future()

    def make() -> None:
        try:
            answer.set_result(call(*arguments))
        except Exception as error:
            answer.set_exception(error)

    start_daemon("ckpt-meeting", make)
    return answer.result(seconds)
