"""Create-only writes with one winner, on stores that overwrite: the daemon's database decides (docs/decisions/0014)."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

from ckptstore import names
from ckptstore.errors import InvalidName, StoreUnsafe, Unavailable
from ckptstore.retry import outage_pauses, retry
from ckptstore.stores import Store
from ckptstore.stores.remote_create import RemoteCreateStore
from ckptstore.values import Value

if TYPE_CHECKING:
    from ckptapi.bodies import DecisionRequest

PATIENCE_S = 60.0
"""How long requests are retried if the daemon does not respond: longer than its restart takes."""
ANSWER_S = 20.0


class DaemonRemoteCreate(Value):
    """The database of the daemon at `url`, which must serve the same store.

    Requests are retried for `patience_s` if the daemon does not respond; proposals are idempotent.
    """

    store: Store
    """The unwrapped store, in which decisions are looked up."""
    url: str
    token: str | None
    patience_s: float = PATIENCE_S
    answer_s: float = ANSWER_S
    """Timeout of one request."""

    def decide(self, key: str, proposal: bytes) -> bytes:
        """Raises DaemonUnavailable, IndexUnavailable or StoreUnavailable if the decision is unknown; Denied."""
        # Imported late: most stores honour create-only writes, so that no HTTP client is needed.
        import httpx

        from ckptapi.client import DaemonClient
        from ckptapi.connection import is_certificate_error

        request = _request(key, proposal)
        with closing(DaemonClient(self.url, self.token, httpx.Timeout(self.answer_s), retries=0)) as client:

            def propose() -> bytes:
                try:
                    return client.decide(request)
                except Unavailable:
                    # A decision that is in the store counts, even if the response was lost.
                    if (stored := self.store.find(key)) is not None:
                        return stored
                    raise

            waits = outage_pauses(self.patience_s)
            decided = retry(propose, Unavailable, waits, unless=is_certificate_error, log_level=logging.WARNING)
        if self.store.find(key) != decided:
            raise StoreUnsafe(
                f"ckptd at {self.url} decided about {key}, but {self.store.url} does not have the decision",
                "Check that it serves the same store. If so, the checkpoint was deleted just now",
            )
        return decided


def _request(key: str, proposal: bytes) -> DecisionRequest:
    from ckptapi.bodies import DecisionRequest

    run, number = names.run_of(key), names.generation_number(key)
    if number is not None:
        return DecisionRequest(run=run, generation=number, proposal=proposal.decode())
    try:
        attempt, tombstone = names.attempt_and_name(key)
    except InvalidName as error:
        raise StoreUnsafe(
            f"a client cannot decide {key}: the store overwrites on create", "Run the operation through the daemon"
        ) from error
    return DecisionRequest(run=run, attempt=str(attempt), tombstone=tombstone or None, proposal=proposal.decode())


def with_remote_create(store: Store, daemon: str | None, token: str | None) -> RemoteCreateStore:
    """The store; if a daemon is given, its database decides. Sends no request before the first decision."""
    return RemoteCreateStore(store, DaemonRemoteCreate(store, daemon, token).decide if daemon is not None else None)
