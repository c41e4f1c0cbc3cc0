"""Who was first, on stores that cannot tell: some servers accept a create-only write and overwrite all the same.

The store is probed before the first decision that this process wants to make. If it is honest, it decides. If not, the
daemon's database decides, and the daemon writes what was decided into the store before it answers; readers look at
the store, as everywhere. Without a daemon a decision is a look and a write, which a warning says.
docs/decisions/0014 has the sequences.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import InvalidName, ObjectMissing, StoreUnsafe, Unavailable
from ckptstore.format.codecs import Buffer
from ckptstore.names import Attempt
from ckptstore.probing import creates_once
from ckptstore.stores import Store, WrappedStore

if TYPE_CHECKING:
    from ckptstore.daemon.client import DaemonClient

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long a daemon that does not answer is asked again: a restart should fit in."""
ANSWER_S = 20.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


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


class DaemonArbiter:
    """The database of the daemon at `url`, which must serve the same store.

    Asked again, for as long as `patience_s`, when it does not answer; a proposal may be repeated.
    """

    def __init__(
        self, store: Store, url: str, token: str | None, patience_s: float = PATIENCE_S, answer_s: float = ANSWER_S
    ) -> None:
        """store: as it is, to look at what was decided. answer_s: an answer takes no longer."""
        self._store = store
        self._url = url
        self._token = token
        self._patience_s = patience_s
        self._answer_s = answer_s

    def decide(self, key: str, proposal: bytes) -> bytes:
        """Raises DaemonUnavailable, IndexUnavailable or StoreUnavailable when nothing could be learned; Denied."""
        # Whoever never asks needs no HTTP client.
        import httpx

        from ckptstore.daemon.client import DaemonClient

        with closing(DaemonClient(self._url, self._token, httpx.Timeout(self._answer_s), retries=0)) as client:
            decided = self._ask(client, key, proposal)
        if self._stored(key) != decided:
            raise StoreUnsafe(
                f"ckptd at {self._url} decided about {key}, and {self._store.url} does not say so",
                "Does it serve the same store? Otherwise the checkpoint was deleted just now",
            )
        return decided

    def _ask(self, client: DaemonClient, key: str, proposal: bytes) -> bytes:
        run, attempt, tombstone = _subject(key)
        deadline = time.monotonic() + self._patience_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                return client.decide(run, attempt, proposal, tombstone)
            except Unavailable as error:
                # What the daemon has written is decided, whatever became of its answer.
                if (stored := self._stored(key)) is not None:
                    return stored
                if time.monotonic() >= deadline:
                    raise
                logger.warning("asking %s again about %s: %s", self._url, key, error)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None


def arbitrated(store: Store, daemon: str | None, token: str | None) -> ArbitratedStore:
    """The store, with the daemon as arbiter if one is given. Nothing is asked of either before the first decision."""
    return ArbitratedStore(store, DaemonArbiter(store, daemon, token) if daemon is not None else None)


def _subject(key: str) -> tuple[str, Attempt, str | None]:
    """Run, attempt and tombstone that a decision is about."""
    try:
        attempt, tombstone = names.attempt_and_name(key)
    except InvalidName as error:
        raise StoreUnsafe(
            f"{key} cannot be decided from here: the store overwrites on create", "Have the daemon do it"
        ) from error
    return names.check_run(key.partition("/")[0]), attempt, tombstone or None
