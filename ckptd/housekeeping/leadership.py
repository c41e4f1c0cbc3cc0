"""Leader election: one daemon at a time does roll-forward, collection, retention and scrubbing.

The leader renews a row of the index. It considers itself the leader for half of the lease, counted from the time at
which it *began* to write the renewal. Another daemon takes over after it has *seen* the row unchanged for three
quarters of the lease. Each daemon uses its own monotonic clock, so that clocks are never compared. A quarter of the
lease lies between the end of one leadership and the start of the next (docs/decisions/0013).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any, TypeVar

from sqlalchemy import Connection
from typing_extensions import override

from ckptd.index import LeaderIndex, Tenure
from ckptstore.clock import system_clock
from ckptstore.errors import CkptError, IndexUnavailable, LeadershipLost
from ckptstore.names import new_ulid
from ckptstore.stores import Store, WrappedStore

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
_LEADS_FOR = 0.5
_TAKE_OVER_AFTER = 0.75
_RENEW_EVERY = 0.1
_DELETES = 100


def boot_clock() -> float:
    """Seconds since the machine booted, including suspended time; this clock cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def reported(report: Callable[[str, CkptError], None], what: str) -> Iterator[None]:
    """Report an error of the work on a run, and go on with the next run. LeadershipLost is raised: there is no next."""
    try:
        yield
    except LeadershipLost:
        raise
    except CkptError as error:
        report(what, error)


@dataclass
class Leadership:
    """Whether this daemon is the leader. `run_once` is for one background thread, the rest for any."""

    _index: LeaderIndex
    _lease_s: float
    """The longest time until another daemon takes over if this one is gone."""
    _clock: Callable[[], float] = boot_clock
    """Monotonic."""

    def __post_init__(self) -> None:
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{new_ulid(system_clock())}"
        self._epoch = 0
        self._until = -inf
        self._may_hold = False
        self._seen: Tenure | None = None
        self._seen_at = 0.0

    @property
    def every_s(self) -> float:
        """Seconds between two rounds."""
        return self._lease_s * _RENEW_EVERY

    def leads(self) -> bool:
        """True if this daemon is the leader, and no other daemon can be for some time."""
        return self._clock() < self._until

    def run_once(self) -> None:
        """Renew the lease, check whether another daemon does, or take over. Never raises CkptError."""
        try:
            if self._may_hold and self._renew():
                return
            self._watch()
        except IndexUnavailable as error:
            _LOG.warning("cannot renew or read the leader's lease: %s", error)

    def close(self) -> None:
        """Resign, so that another daemon can take over at once; running work is stopped by its next check."""
        self._until = -inf
        if self._may_hold:
            try:
                self._index.resign(self._holder)
            except IndexUnavailable as error:
                _LOG.warning("cannot resign; the next leader must wait until this lease expires: %s", error)

    def check(self) -> None:
        """Raise LeadershipLost unless this daemon is the leader. Call it immediately before each change."""
        if not self.leads():
            raise LeadershipLost("this daemon is not the leader, or its lease expired", "Another daemon takes over")

    def fence(self, connection: Connection) -> None:
        """The same within a transaction: until it ends, no other daemon can become the leader."""
        self.check()
        self._index.fence(connection, self._holder, self._epoch)

    def _renew(self) -> bool:
        began = self._clock()
        epoch = self._index.renew(self._holder)
        if epoch is None:
            self._may_hold = False
            self._until = -inf
            _LOG.warning("another daemon is now the leader")
            return False
        self._extend(epoch, began)
        return True

    def _watch(self) -> None:
        seen = self._index.look()
        now = self._clock()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if seen.holder and now - self._seen_at < self._lease_s * _TAKE_OVER_AFTER:
            return
        # Set before the claim: if its reply is lost, the renewal in the next round shows the result.
        self._may_hold = True
        epoch = self._index.claim(self._holder, seen)
        if epoch is None:
            self._may_hold = False
            return
        self._extend(epoch, now)
        _LOG.info("this daemon is now the leader, epoch %d", epoch)

    def _extend(self, epoch: int, since: float) -> None:
        self._epoch = epoch  # first: any thread that sees the new time must see the epoch
        self._until = since + self._lease_s * _LEADS_FOR


class LeaderStore(WrappedStore):
    """A store that only the leader can change. Raises LeadershipLost.

    If the process is suspended between check and operation, one operation may still happen after it resumes.
    """

    def __init__(self, store: Store, leadership: Leadership) -> None:
        super().__init__(store)
        self._check = leadership.check

    def delete_many(self, keys: Iterable[str]) -> None:
        """Leadership is checked before each key, and before each batch of keys."""
        left = iter(keys)
        while batch := list(islice(left, _DELETES)):
            self._store.delete_many(self._checked(batch))

    @override
    def _change(self, call: Callable[..., _T], *args: Any) -> _T:
        self._check()
        return call(*args)

    _open = _change

    def _checked(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            self._check()
            yield key
