"""Notifier: notifies the daemon of commits. This is an optimization; the daemon finds them later by listing.

Nothing waits for a notification: a slow or dead daemon delays neither a commit nor the end of the saver.
"""

from __future__ import annotations

import logging
import threading

from ckptstore.errors import CkptError
from ckptstore.names import Attempt

logger = logging.getLogger(__name__)

_TIMEOUT_S = 5.0
_CLOSE_TIMEOUT_S = 1.0


class Notifier:
    """Sends the newest commit on its own thread. commit and close may be called from any thread."""

    def __init__(self, daemon: str, token: str | None, run: str) -> None:
        self._daemon = daemon
        self._token = token
        self._run = run
        self._changed = threading.Condition()
        self._newest: Attempt | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="ckpt-notify", daemon=True)
        self._thread.start()

    def commit(self, attempt: Attempt) -> None:
        """Enqueue a notification of this commit; it replaces an older one that was not sent yet."""
        with self._changed:
            self._newest = attempt
            self._changed.notify()

    def close(self) -> None:
        """Stop; waits at most _CLOSE_TIMEOUT_S for the last notification."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        # Imported here, so that savers without a daemon do not load the HTTP client.
        import httpx

        from ckptapi.client import DaemonClient

        client = DaemonClient(self._daemon, self._token, timeout=httpx.Timeout(_TIMEOUT_S), retries=0)
        while (attempt := self._next()) is not None:
            try:
                client.notify(self._run, attempt)
            except CkptError as error:
                logger.warning("could not notify the daemon of %s: %s", attempt, error)
        client.close()

    def _next(self) -> Attempt | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closing)
            attempt, self._newest = self._newest, None
            return attempt
