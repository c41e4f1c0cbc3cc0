"""Rank 0 publishes when to save; the other ranks request saves and report their costs. No collective.

A thread of each rank does so through the key-value store of the process group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from ckpt.ranks import world
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import RankLost
from ckptstore.format.decoding import decode_msgpack
from ckptstore.threads import start_daemon
from ckptstore.values import Value

_DECISION = "decision"
_REQUESTS = "requests"
_COST = "cost"
_NOTICE = "notice"
_EXPEDITED_S = 0.02
_PATIENCE_S = 2.0


class SaveDecision(Value, array_like=True):
    """The steps at which to save, among all steps up to the horizon."""

    horizon: int
    num_saves: int
    saves: tuple[int, ...]
    """The newest ones; the steps of all earlier saves are past."""
    stop_at: int = -1
    """The step after which the loop ends, because of a preemption; -1: there is none."""
    estimate: tuple[Literal["save", "finish"], float, float | None] = ("save", 0.0, None)
    """The action at `stop_at`, and why: the fields of ckpt.preemption.SaveEstimate."""


class Cost(NamedTuple):
    """Cost of a save on one rank. The larger one counts: of a later save, or more seconds of the same save."""

    save: int
    """The number of saves that were due before it."""
    seconds: float


_WORTH_REPORTING = 1.1
"""A cost is reported again when it has grown by this factor."""


@dataclass
class SaveBroadcast:
    """One rank's end. All public methods belong to the training thread; `request` is also safe in a signal handler."""

    _store: Any
    """A key-value store of torch that all ranks share, used for nothing else."""
    _rank: int
    _poll_s: float
    _members: Sequence[int]
    """Global ranks by rank, for messages."""
    _deadline: Callable[[], float | None] = lambda: None
    """When this rank must be done, if it has notice of a preemption. Called in the thread."""
    _clock: Clock = system_clock

    def __post_init__(self) -> None:
        self._notified = False
        self.notice: float | None = None
        """When one of the ranks must be done, in seconds since the epoch. For any thread."""
        self._named, self._first = self._members[self._rank], self._members[0]
        """This rank and rank 0 in messages."""
        self._changed = threading.Condition()
        self._decision: SaveDecision | None = None
        self._expedited = self._closing = False
        self._error: Exception | None = None
        self._asked = 0
        self._own_cost = Cost(0, 0.0)
        self.cost = Cost(0, 0.0)
        """Highest cost of the last save among the other ranks (rank 0 only)."""
        self.requests = 0
        """The number of saves that other ranks have requested (rank 0 only)."""
        self._thread = start_daemon("ckpt-broadcast", self._run)

    def publish(self, decision: SaveDecision) -> None:
        """Publish a decision within the poll interval; rank 0. Raises RankLost if the store is gone."""
        with self._changed:
            self._check()
            self._decision = decision
            self._changed.notify_all()

    def wait_for(self, enough: Callable[[SaveDecision], bool], timeout_s: float) -> SaveDecision:
        """The last decision of rank 0; waits only until there is one that is enough. Raises RankLost."""
        with self._changed:
            self._expedited = True
            self._changed.notify_all()

            def decided() -> bool:
                return self._error is not None or (self._decision is not None and enough(self._decision))

            found = self._changed.wait_for(decided, min(timeout_s, world.NOTICE_S))
            if not found and timeout_s > world.NOTICE_S:
                world.log_wait(self._named, f"rank {self._first}, which decides when to save")
                found = self._changed.wait_for(decided, timeout_s - world.NOTICE_S)
            self._expedited = False
            self._check()
            if not found:
                raise RankLost(
                    f"rank {self._first} did not publish within {timeout_s:.0f} s whether to save",
                    f"Every rank calls due() with the same steps; look at the log of rank {self._first}, or raise "
                    "peer_timeout_s",
                )
            assert self._decision is not None
            return self._decision

    def request(self) -> None:
        """Request a save from rank 0. Takes no lock: a signal handler may call it."""
        self._asked += 1

    def report(self, cost: Cost) -> None:
        """Report what a save has cost this rank so far to rank 0; other ranks. Does not block."""
        with self._changed:
            told = self._own_cost
            if cost.save > told.save or cost.seconds > _WORTH_REPORTING * told.seconds:
                self._own_cost = cost

    def close(self) -> None:
        """Publish the last decision, and end the thread. A thread that is blocked in the store is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)

    def _check(self) -> None:
        if self._error is not None:
            raise RankLost(
                f"rank {self._named} lost the store of its process group: {self._error}",
                "The process that hosts it (rank 0 of the job, or torchrun's agent) is gone; restart the job",
            ) from self._error

    def _run(self) -> None:
        try:
            if self._rank == 0:
                self._publish_decisions()
            else:
                self._listen()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _publish_decisions(self) -> None:
        told = None
        closing = False
        self._store.set(_COST, _text(Cost(0, 0.0)))  # before any decision, and so before any rank has a cost to report
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._decision is not told, self._poll_s)  # noqa: B023
                decision, closing = self._decision, self._closing
            if decision is not told:
                self._store.set(_DECISION, msgspec.msgpack.encode(decision))
                told = decision
            self._exchange_notice()
            self.requests, self.cost = self._store.add(_REQUESTS, 0), _cost(self._store.get(_COST))

    def _listen(self) -> None:
        sent, told = 0, Cost(0, 0.0)
        there = False
        while True:
            with self._changed:
                cost = self._own_cost
            if cost > told:
                seen, told = self._store.get(_COST), cost
                while _cost(seen) < cost:  # several ranks may report at the same time; the highest stays
                    seen = self._store.compare_set(_COST, bytes(seen).decode(), _text(cost))
            if (asked := self._asked) > sent:
                self._store.add(_REQUESTS, asked - sent)
                sent = asked
            self._exchange_notice()
            # A get of a missing key would block every other use of the store.
            there = there or self._store.check([_DECISION])
            decision = decode_msgpack(bytes(self._store.get(_DECISION)), SaveDecision) if there else None
            with self._changed:
                if decision != self._decision:
                    self._decision = decision
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._expedited, self._poll_s)
                if self._expedited:
                    self._changed.wait_for(lambda: self._closing or not self._expedited, _EXPEDITED_S)
                if self._closing:
                    return

    def _exchange_notice(self) -> None:
        """Publish the notice of this rank, once, and look for that of another one."""
        if not self._notified and (deadline := self._deadline()) is not None:
            self._store.set(_NOTICE, repr(deadline - self._clock()))  # hosts have different clocks
            self._notified = True
        if self.notice is None and self._store.check([_NOTICE]):
            self.notice = self._clock() + float(bytes(self._store.get(_NOTICE)))


def _text(cost: Cost) -> str:
    return f"{cost.save} {cost.seconds!r}"  # exact, because it is compared


def _cost(text: bytes) -> Cost:
    save, seconds = bytes(text).decode().split()
    return Cost(int(save), float(seconds))
