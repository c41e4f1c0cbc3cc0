"""Who was first, on stores that cannot tell: some servers accept a create-only write and overwrite all the same.

The store is probed before the first decision that this process wants to make. If it is honest, it decides. If not, the
daemon's database decides, and the daemon writes what was decided into the store before it answers; readers look at
the store, as everywhere. Without a daemon a decision is a look and a write, which a warning says.
docs/decisions/0014 has the sequences.
"""

from __future__ import annotations

import logging
from typing import Protocol

from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.commits.store_check import creates_once
from ckptstore.errors import ObjectMissing
from ckptstore.format.codecs import Buffer
from ckptstore.stores import Store, WrappedStore

logger = logging.getLogger(__name__)


class Arbiter(Protocol):
    """Somebody who knows which of several proposals for one key came first. For any thread."""

    def decide(self, key: str, proposal: bytes) -> bytes:
        """What was proposed first for `key`, now or ever; it is in the store on return. May be repeated."""


class ArbitratedStore(WrappedStore):
    """A store whose decisions have one winner, as far as there is an arbiter where the store itself is none.

    The first decision may take the time of a probe. All methods as on the store, from any thread.
    """

    def __init__(self, store: Store, arbiter: Arbiter | None, clock: Clock = system_clock) -> None:
        super().__init__(store)
        self.arbitrated = arbiter is not None
        self._arbiter = arbiter
        self._clock = clock
        self._warned = False

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """By the store, or the arbiter; where there is neither, a look and then a write.

        Raises besides what the store raises: DaemonUnavailable, IndexUnavailable, StoreUnsafe, or Denied. Nothing
        may be concluded then.
        """
        if key.startswith(names.PROBES_PREFIX) or creates_once(self._store, self._clock):
            return self._store.put_if_absent(key, data)
        if not names.is_decision(key):
            return self._look_and_put(key, data)
        if self._arbiter is not None:
            proposal = bytes(data)
            return self._arbiter.decide(key, proposal) == proposal
        self._warn()
        return self._look_and_put(key, data)

    def _look_and_put(self, key: str, data: Buffer) -> bool:
        try:
            self._store.size(key)
        except ObjectMissing:
            self._store.put(key, data)
            return True
        return False

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s accepts create-only writes and overwrites: if somebody gives up an attempt at the moment in which "
                "it is committed, both may win. Name a daemon (CKPTD_URL), whose database decides",
                self.url,
            )
