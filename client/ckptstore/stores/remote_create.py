"""Create-if-absent for stores that ignore `If-None-Match` and overwrite.

The store is probed before the first decision of this process. A store that honours create-only writes decides itself.
Otherwise the daemon's database decides, and the daemon writes the decision to the store before it responds. Readers
always read the store. Without a daemon, a decision is a read and a write, and a warning is logged.
docs/decisions/0014 has the sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing
from ckptstore.stores import Store, WrappedStore
from ckptstore.stores.checks import creates_once

logger = logging.getLogger(__name__)


Decide = Callable[[str, bytes], bytes]
"""The first of all proposals for a key, in the store on return: of the key and a proposal. Idempotent, for any
thread."""


class RemoteCreateStore(WrappedStore):
    """A store whose create-only writes have one winner, if the store itself or `decide` guarantees it.

    The first decision may take as long as a probe. Any thread may call any method.
    """

    def __init__(self, store: Store, decide: Decide | None, clock: Clock = system_clock) -> None:
        super().__init__(store)
        self.remote_create = decide is not None
        self._decide = decide
        self._clock = clock
        self._warned = False

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        """Decided by the store or by `decide`; without either, a read and then a write.

        Raises what the store raises, or DaemonUnavailable, IndexUnavailable, StoreUnsafe or Denied. After an error the
        decision is unknown.
        """
        if key.startswith(names.PROBES_PREFIX) or creates_once(self._store, self._clock):
            return self._store.put_if_absent(key, data)
        if names.is_decision(key):
            if self._decide is not None:
                proposal = bytes(data)
                return self._decide(key, proposal) == proposal
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s accepts create-only writes and overwrites: if an attempt is aborted while it is being "
                    "committed, both may succeed. Set CKPTD_URL to a daemon, whose database then decides",
                    self.url,
                )
        try:
            self._store.size(key)
        except ObjectMissing:
            self._store.put(key, data)
            return True
        return False
