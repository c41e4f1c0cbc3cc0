"""What rank 0 tells the other ranks, and what they ask of it, without anybody waiting for it on the training thread.

It goes through the key-value store of the process group, in a thread of each rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ckptstore.errors import RankLost

_NEWS = "news"
_REQUESTS = "requests"
_COST = "cost"
_HURRY_S = 0.02
_PATIENCE_S = 2.0


class News(msgspec.Struct, frozen=True, array_like=True):
    """What is decided: of all steps up to the horizon, those at which to save."""

    horizon: int
    num_saves: int
    saves: tuple[int, ...]
    """The newest of them; the steps of all before are past."""


class Cost(NamedTuple):
    """What a save cost a rank. The larger one counts: of a later save, or of the same one with more seconds."""

    save: int
    """How many were due before it."""
    seconds: float


_WORTH_TELLING = 1.1
"""A cost that has grown by less since it was told is not told again."""


class Bulletin:
    """One rank's side of it. tell, hear, request and close belong to the training thread."""

    def __init__(self, store: Any, rank: int, poll_s: float) -> None:
        """store: a key-value store of torch that all ranks share, for this alone."""
        self._store = store
        self._rank = rank
        self._poll_s = poll_s
        self._changed = threading.Condition()
        self._news: News | None = None
        self._hurry = self._closing = False
        self._error: Exception | None = None
        self._asked = 0
        self._own_cost = Cost(0, 0.0)
        self.cost = Cost(0, 0.0)
        """What the last save cost the one of the other ranks that it cost most; for rank 0."""
        self.requests = 0
        """How often other ranks have asked for a save; for rank 0."""
        self._thread = threading.Thread(target=self._run, name="ckpt-bulletin", daemon=True)
        self._thread.start()

    def tell(self, news: News) -> None:
        """Have the others know, soon; rank 0. Raises RankLost if the store is gone."""
        with self._changed:
            self._check()
            self._news = news
            self._changed.notify_all()

    def hear(self, enough: Callable[[News], bool], timeout_s: float) -> News:
        """What rank 0 told last, waiting only if that is not enough. Raises RankLost."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            heard = self._changed.wait_for(
                lambda: self._error or (self._news is not None and enough(self._news)), timeout_s
            )
            self._hurry = False
            self._check()
            if not heard:
                raise RankLost(
                    f"rank 0 did not say within {timeout_s:.0f} s whether to save",
                    "Every rank calls due() with the same steps; look at rank 0's log, or raise peer_timeout_s",
                )
            assert self._news is not None
            return self._news

    def request(self) -> None:
        """Ask rank 0 for a save. Takes no lock: a signal handler may call it."""
        self._asked += 1

    def report(self, cost: Cost) -> None:
        """Have rank 0 know what a save has cost this rank so far; other ranks. Waits for nothing."""
        told = self._own_cost
        if cost.save > told.save or cost.seconds > _WORTH_TELLING * told.seconds:
            self._own_cost = cost

    def close(self) -> None:
        """Publish what was told last, and end the thread; one that the store keeps waiting is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(_PATIENCE_S)

    def _check(self) -> None:
        if self._error is not None:
            raise RankLost(
                f"rank {self._rank} lost the store of its process group: {self._error}",
                "The process that hosts it (rank 0, or torchrun's agent) is gone; restart the job",
            ) from self._error

    def _run(self) -> None:
        try:
            if self._rank == 0:
                self._publish()
            else:
                self._listen()
        except Exception as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _publish(self) -> None:
        told = None
        closing = False
        self._store.set(_COST, _text(self.cost))  # before any news, and so before anybody has a cost to tell
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._news is not told, self._poll_s)  # noqa: B023
                news, closing = self._news, self._closing
            if news is not told:
                self._store.set(_NEWS, msgspec.msgpack.encode(news))
                told = news
            self.requests = self._store.add(_REQUESTS, 0)
            self.cost = _cost(self._store.get(_COST))

    def _listen(self) -> None:
        sent, told = 0, Cost(0, 0.0)
        there = False
        while True:
            if (cost := self._own_cost) > told:
                self._tell_cost(cost)
                told = cost
            if (asked := self._asked) > sent:
                self._store.add(_REQUESTS, asked - sent)
                sent = asked
            # A get of what is not there yet would hold up every other use of the store.
            there = there or self._store.check([_NEWS])
            news = msgspec.msgpack.decode(bytes(self._store.get(_NEWS)), type=News) if there else None
            with self._changed:
                if news != self._news:
                    self._news = news
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing or self._hurry, self._poll_s)
                if self._hurry:
                    self._changed.wait_for(lambda: self._closing or not self._hurry, _HURRY_S)
                if self._closing:
                    return

    def _tell_cost(self, cost: Cost) -> None:
        """Unless another rank has told more. All of them may do so at once."""
        seen = self._store.get(_COST)
        while _cost(seen) < cost:
            seen = self._store.compare_set(_COST, bytes(seen).decode(), _text(cost))


def _text(cost: Cost) -> str:
    return f"{cost.save} {cost.seconds!r}"  # exactly: it is compared


def _cost(text: bytes) -> Cost:
    save, seconds = bytes(text).decode().split()
    return Cost(int(save), float(seconds))
