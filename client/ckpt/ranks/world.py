"""This process among its ranks. A single process is a world of size 1.

Ranks exchange values through the key-value store of the process group, not through collectives: it works with any
backend, does not use a GPU, and lost ranks can be named. The training thread calls nothing here after the first save.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist
from xxhash import xxh3_128_digest

from ckpt.capture.ownership import Ownership, Unit, Units, agree
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, RankLost, SaveFailed, error_from_code
from ckptstore.names import new_ulid
from ckptstore.retry import pauses

logger = logging.getLogger(__name__)

_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.25
_BEAT_S = 1.0
_NOTICE_S = 10.0
"""A wait for another rank is logged after this time."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Meetings:
    """The exchanges of one process group so far. The count is equal on all ranks, so their keys are equal."""

    store: Any = None
    count: int = 0
    answers: list[str] = field(default_factory=list)
    group: Any = None


_meetings = _Meetings()
"""The meetings of the current default process group. Process-wide, like the group: all Worlds share them."""


def is_grouped() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


class World:
    """The default process group, if there is one. One thread calls the collectives; any thread may call `beat`."""

    def __init__(self, timeout_s: float, solo: bool = False) -> None:
        """timeout_s: a rank without a heartbeat for this long is lost. solo: this process alone, without its group."""
        grouped = not solo and is_grouped()
        self.rank: int = dist.get_rank() if grouped else 0
        self.size: int = dist.get_world_size() if grouped else 1
        # A lost rank may stall an exchange and then the meeting after it: both must fit into the timeout.
        self._silence_s, self._exchange_s = 0.6 * timeout_s, 0.25 * timeout_s
        self._beat_s = min(_BEAT_S, self._silence_s / 4)
        self._beating = threading.Lock()
        self._beats = 0
        self._last_beat = 0.0
        if self.size > 1:
            store = dist.distributed_c10d._get_default_store()
            global _meetings
            if store is not _meetings.store:
                _meetings = _Meetings(store)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value (JSON types and bytes), on every rank, by rank. Raises RankLost."""
        if self.size == 1:
            return [value]
        key = self._next_key()
        self._set(f"{key}/{self.rank}", [value])
        if self.rank == 0:
            try:
                found = [self._get(f"{key}/{rank}", rank)[0] for rank in range(self.size)]
            except RankLost as error:
                self._set(key, [None, error.message, error.hint])
                # The store may end with this process: first let the other ranks read which rank is lost.
                time.sleep(2 * _LONGEST_POLL_S)
                raise
            self._set(key, [found])
            self._forget(key)
            return found
        return list(self._answer(key))

    def gather_alike(self, value: bytes) -> dict[bytes, tuple[int, ...]]:
        """The distinct values of all ranks, each with its ranks; an equal value is sent once. Raises RankLost."""
        saying: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(self.gather(xxh3_128_digest(value))):
            saying.setdefault(digest, []).append(rank)
        first = {ranks[0] for ranks in saying.values()}
        values = self.gather(value if self.rank in first else None)
        return {values[ranks[0]]: tuple(ranks) for ranks in saying.values()}

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Raises RankLost."""
        if self.size == 1:
            return value
        key = self._next_key()
        if self.rank == 0:
            self._set(key, [value])
            return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return self._answer(key)

    def beat(self) -> None:
        """Send a heartbeat to the ranks that wait for this one. Cheap, because it is rate-limited. Raises RankLost."""
        with self._beating:
            now = time.monotonic()
            if self.size == 1 or now - self._last_beat < self._beat_s:
                return
            self._last_beat = now
            self._beats += 1
        self._ask(_meetings.store.set, f"ckpt/beat/{self.rank}", str(self._beats))

    def private_store(self) -> Any:
        """A key-value store that all ranks share, with a prefix of its own. All ranks must call this in the same order.

        Only for threads that may block: the calls of the store have no timeout."""
        _meetings.count += 1
        return dist.distributed_c10d.PrefixStore(f"ckpt/{_meetings.count}", _meetings.store)

    def exchange_group(self) -> dist.ProcessGroup:
        """A gloo process group that exchanges bytes in host memory. The first call creates it, and is a collective."""
        if _meetings.group is None:
            _meetings.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._exchange_s))
        group: dist.ProcessGroup = _meetings.group
        return group

    def _next_key(self) -> str:
        _meetings.count += 1
        key = f"ckpt/{_meetings.count}"
        if self.rank == 0:
            _meetings.answers.append(key)
        return key

    def _forget(self, key: str) -> None:
        """All ranks have reached meeting `key`: delete its values, and the earlier answers, which all have read."""
        *read, last = _meetings.answers
        _meetings.answers = [last]
        for name in (*read, *(f"{key}/{rank}" for rank in range(self.size))):
            self._ask(_meetings.store.delete_key, name)

    def _set(self, key: str, value: Any) -> None:
        self._ask(_meetings.store.set, key, msgspec.msgpack.encode(value))

    def _answer(self, key: str) -> Any:
        answer = self._get(key, 0)
        if len(answer) == 3:
            raise RankLost(answer[1], answer[2])
        return answer[0]

    def _get(self, key: str, rank: int) -> Any:
        """Wait for the value that `rank` sets. Raises RankLost if the rank sends no heartbeat meanwhile."""
        last_beat, deadline = b"", time.monotonic() + self._silence_s
        notice = time.monotonic() + _NOTICE_S
        waits = pauses(_FIRST_POLL_S, _LONGEST_POLL_S, factor=1.5, jitter=False)
        # Store.wait would print a warning at each timeout.
        while not self._ask(_meetings.store.check, [key]):
            self.beat()
            beat = self._beat_of(rank)
            if beat != last_beat:
                last_beat, deadline = beat, time.monotonic() + self._silence_s
            if time.monotonic() > deadline:
                raise RankLost(
                    f"rank {rank} of {self.size} sent no heartbeat for {self._silence_s:.0f} s",
                    "Look at that rank's log; restart the job, or raise peer_timeout_s if it was merely slow",
                )
            if time.monotonic() > notice:
                notice = math.inf
                logger.warning(
                    "rank %d has waited %.0f s for rank %d of %d; all ranks must make the same calls of ckpt",
                    self.rank,
                    _NOTICE_S,
                    rank,
                    self.size,
                )
            time.sleep(next(waits))
        return msgspec.msgpack.decode(bytes(self._ask(_meetings.store.get, key)))

    def _beat_of(self, rank: int) -> bytes:
        name = f"ckpt/beat/{rank}"
        return bytes(self._ask(_meetings.store.get, name)) if self._ask(_meetings.store.check, [name]) else b""

    def _ask(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """The store's answer. Raises RankLost if the store is gone or does not answer: its calls have no timeout."""
        answer: Future[_T] = Future()
        threading.Thread(target=_call, args=(answer, call, *arguments), name="ckpt-meeting", daemon=True).start()
        try:
            return answer.result(self._silence_s)
        except (TimeoutError, dist.DistNetworkError) as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} lost the store of its process group: {str(error) or 'no answer'}",
                "The process that hosts it (rank 0, or torchrun's agent) is gone or hangs; restart the job",
            ) from error


def _call(answer: Future[_T], call: Callable[..., _T], *arguments: Any) -> None:
    try:
        answer.set_result(call(*arguments))
    except Exception as error:
        answer.set_exception(error)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks of a job agreed on; equal on each, except for the view in `ownership`."""

    session: str
    """A ULID, from which the attempts of all saves are derived."""
    ownership: Ownership
    different_buffers: tuple[str, ...]
    """Buffers that are not equal on all ranks; the first holder's are kept."""


def meet(world: World, describe: Callable[[], dict[str, Unit]], split_replicas: bool) -> Agreement:
    """Exchange the units that every rank holds, and agree on their owners. A collective of all ranks.

    Each distinct list of units is sent once, even if several ranks hold it. Raises the first rank's error from
    `describe`, on every rank; UnsupportedObject; RankLost.
    """
    try:
        units = describe()
    except Exception as error:  # of any type: the other ranks wait for an answer
        failure = error if isinstance(error, CkptError) else SaveFailed(f"cannot describe its state: {error!r}")
        world.gather([failure.code, failure.message, failure.hint])
        raise
    packed = msgspec.msgpack.encode({name: msgspec.structs.replace(u, boxes=()) for name, u in units.items()})
    said = world.gather([new_ulid(system_clock())])
    for rank, answer in enumerate(said):
        if len(answer) == 3:
            code, message, hint = answer
            raise error_from_code(code, f"rank {rank}: {message}", hint)
    held: list[Units] = [units] * world.size
    for data, ranks in world.gather_alike(packed).items():
        theirs = msgspec.msgpack.decode(data, type=dict[str, Unit])
        for rank in ranks:
            if rank != world.rank:
                held[rank] = theirs
    ownership, different = agree(world.rank, held, split_replicas)
    return Agreement(said[0][0], ownership, tuple(different))
