"""Create-only writes with one winner, on stores that overwrite: the daemon's database decides (docs/decisions/0014)."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

from ckptstore import names
from ckptstore.commits.remote_create import ArbitratedStore
from ckptstore.errors import InvalidName, ObjectMissing, StoreUnsafe, Unavailable
from ckptstore.names import Attempt
from ckptstore.retry import pauses, retry
from ckptstore.stores import Store

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient

PATIENCE_S = 60.0
"""How long requests are retried if the daemon does not respond: longer than its restart takes."""
ANSWER_S = 20.0
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class DaemonArbiter:
    """The database of the daemon at `url`, which must serve the same store.

    Requests are retried for `patience_s` if the daemon does not respond; proposals are idempotent.
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
        """Raises DaemonUnavailable, IndexUnavailable or StoreUnavailable if the decision is unknown; Denied."""
        # Imported late: most stores need no arbiter, and so no HTTP client.
        import httpx

        from ckptapi.client import DaemonClient

        with closing(DaemonClient(self._url, self._token, httpx.Timeout(self._answer_s), retries=0)) as client:
            decided = self._ask(client, key, proposal)
        if self._stored(key) != decided:
            raise StoreUnsafe(
                f"ckptd at {self._url} decided about {key}, but {self._store.url} does not have the decision",
                "Check that it serves the same store. If so, the checkpoint was deleted just now",
            )
        return decided

    def _ask(self, client: DaemonClient, key: str, proposal: bytes) -> bytes:
        run, attempt, tombstone = _subject(key)

        def ask() -> bytes:
            try:
                return client.decide(run, attempt, proposal, tombstone)
            except Unavailable:
                # A decision that is in the store counts, even if the response was lost.
                if (stored := self._stored(key)) is not None:
                    return stored
                raise

        waits = pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, timeout_s=self._patience_s)
        return retry(ask, Unavailable, waits, log_level=logging.WARNING)

    def _stored(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)
        except ObjectMissing:
            return None


def arbitrated(store: Store, daemon: str | None, token: str | None) -> ArbitratedStore:
    """The store, with the daemon as arbiter if one is given. Nothing is asked of either before the first decision."""
    return ArbitratedStore(store, DaemonArbiter(store, daemon, token) if daemon is not None else None)


def _subject(key: str) -> tuple[str, Attempt, str | None]:
    """Run, attempt and tombstone of a decision."""
    try:
        attempt, tombstone = names.attempt_and_name(key)
    except InvalidName as error:
        raise StoreUnsafe(
            f"a client cannot decide {key}: the store overwrites on create",
            "Run the operation through the daemon",
        ) from error
    return names.check_run(key.partition("/")[0]), attempt, tombstone or None
