"""One daemon at a time does the work that only one should do: roll-forward, collection, retention, scrubbing.

The leader renews a row of the index. It believes that it leads for half of the lease, from the moment at which it
*began* to write the renewal. Another daemon takes over when it has *seen* the row unchanged for three quarters of the
lease. Each measures on its own monotonic clock, so that no two clocks are compared, and a quarter of the lease lies
between the end of one belief and the beginning of the next (docs/decisions/0013).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from math import inf

from sqlalchemy import Connection

from ckptd.index import LeaderIndex, Tenure
from ckptstore.clock import system_clock
from ckptstore.errors import IndexUnavailable, LeadershipLost
from ckptstore.format.codecs import Buffer
from ckptstore.names import new_ulid
from ckptstore.stores import ObjectWriter, Store, WrappedStore

_LOG = logging.getLogger(__name__)
_BELIEF = 0.5
_SILENCE = 0.75
_ROUND = 0.1
_DELETES = 100


def boot_clock() -> float:
    """Seconds since the machine started, those that it slept included; nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership:
    """Whether this daemon leads. `round` is for one background thread, the rest for any."""

    def __init__(self, index: LeaderIndex, lease_s: float, clock: Callable[[], float] = boot_clock) -> None:
        """lease_s: so soon at the latest another daemon leads, if this one is gone. clock: monotonic."""
        self._index = index
        self._lease_s = lease_s
        self._clock = clock
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{new_ulid(system_clock())}"
        self._lock = threading.Lock()
        self._epoch = 0
        self._until = -inf
        self._may_hold = False
        self._seen: Tenure | None = None
        self._seen_at = 0.0

    @property
    def every_s(self) -> float:
        """Between two rounds."""
        return self._lease_s * _ROUND

    def leads(self) -> bool:
        """True if no other daemon can lead for some time to come."""
        with self._lock:
            return self._clock() < self._until

    def run_once(self) -> None:
        """Renew, or look whether somebody else does, or take over. Never raises CkptError."""
        try:
            if self._may_hold and self._renew():
                return
            self._watch()
        except IndexUnavailable as error:
            _LOG.warning("cannot renew or look at the leader's lease: %s", error)

    def close(self) -> None:
        """Lead no more, and let others begin at once; what is under way is stopped by its next check."""
        with self._lock:
            self._until = -inf
        if self._may_hold:
            try:
                self._index.resign(self._holder)
            except IndexUnavailable as error:
                _LOG.warning("the next leader has to wait until our lease has run out: %s", error)

    def check(self) -> None:
        """Raise LeadershipLost unless this daemon leads; to be called right before anything is changed."""
        if not self.leads():
            raise LeadershipLost("this daemon does not lead, or could not say so in time", "Another one goes on")

    def fence(self, connection: Connection) -> None:
        """The same for a transaction: while it lasts, no other daemon can begin to lead."""
        self.check()
        self._index.fence(connection, self._holder, self._epoch)

    def _renew(self) -> bool:
        began = self._clock()
        epoch = self._index.renew(self._holder)
        if epoch is None:
            self._may_hold = False
            with self._lock:
                self._until = -inf
            _LOG.warning("another daemon leads now")
            return False
        self._believe(epoch, began)
        return True

    def _watch(self) -> None:
        seen = self._index.look()
        now = self._clock()
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        if seen.holder and now - self._seen_at < self._lease_s * _SILENCE:
            return
        # Before the attempt: if its reply is lost, the next round finds out by renewing.
        self._may_hold = True
        epoch = self._index.claim(self._holder, seen)
        if epoch is None:
            self._may_hold = False
            return
        self._believe(epoch, now)
        _LOG.info("leads, epoch %d", epoch)

    def _believe(self, epoch: int, since: float) -> None:
        with self._lock:
            self._epoch = epoch
            self._until = since + self._lease_s * _BELIEF


class LeaderStore(WrappedStore):
    """A store that only the leader can change. Raises LeadershipLost.

    What was asked of the store before this process was stopped may still happen after it wakes: one operation.
    """

    def __init__(self, store: Store, leadership: Leadership) -> None:
        super().__init__(store)
        self._check = leadership.check

    def put(self, key: str, data: Buffer) -> None:
        """As the leader."""
        self._check()
        self._store.put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """As the leader."""
        self._check()
        return self._store.put_if_absent(key, data)

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        """As the leader."""
        self._check()
        return self._store.open_writer(key, size_hint)

    def delete_many(self, keys: Iterable[str]) -> None:
        """As the leader: checked before each key, and before each request that a store makes of many."""
        left = iter(keys)
        while batch := list(islice(left, _DELETES)):
            self._store.delete_many(self._checked(batch))

    def abort_uploads(self, prefix: str, begun_before: float) -> int:
        """As the leader."""
        self._check()
        return self._store.abort_uploads(prefix, begun_before)

    def _checked(self, keys: Iterable[str]) -> Iterator[str]:
        for key in keys:
            self._check()
            yield key
