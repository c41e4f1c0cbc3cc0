"""The daemon's view of a restore: one session for all ranks, with each rank's progress.

A session is informational: the ranks themselves agree on the checkpoint, and on whether the restore succeeded.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt.config import Config
from ckptapi.bodies import Phase, RestoreRequest
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError
from ckptstore.threads import start_daemon

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient

logger = logging.getLogger(__name__)

_REPORT_S = 2.0


@dataclass
class RestoreSession:
    """This rank's part in one session; without `join`, it reports nothing. `progress` may be called from any thread."""

    _config: Config
    _rank: int
    _world_size: int

    def __post_init__(self) -> None:
        self._client: DaemonClient | None = None
        self._id = ""
        self._lock = threading.Lock()
        self._phase, self._done, self._total = Phase.PLANNING, 0, 0
        self._stop = threading.Event()

    @property
    def joined(self) -> bool:
        """Whether this rank takes part; also if there is no daemon to take part at."""
        return self._client is not None or self._config.daemon is None

    def join(self, checkpoint: Checkpoint, key: str) -> None:
        """Join the session `key` at the daemon, if there is one. Logs a warning if that fails."""
        if self._config.daemon is None:
            return
        import httpx

        from ckptapi.client import DaemonClient

        # If the daemon hangs, the other ranks must not take this one for lost.
        timeout = httpx.Timeout(min(60.0, self._config.peer_timeout_s / 6), connect=5.0)
        client = DaemonClient(self._config.daemon, self._config.token, timeout)
        request = RestoreRequest(
            run=checkpoint.run, key=key, world_size=self._world_size, rank=self._rank, checkpoint=checkpoint.id,
            ttl_s=max(1.0, self._config.peer_timeout_s), host=socket.gethostname(),
        )  # fmt: skip
        try:
            body = client.join_restore(request)
        except CkptError as error:
            logger.warning("restoring without a session at the daemon: %s", error)
            client.close()
            return
        self._client, self._id = client, body.id
        self._reporter = start_daemon("ckpt-restore-session", self._report_often, client)

    def enter(self, phase: Phase, total_bytes: int | None = None) -> None:
        """Set this rank's phase. total_bytes: the bytes it will fetch; resets the count of fetched bytes."""
        with self._lock:
            self._phase = phase
            if total_bytes is not None:
                self._done, self._total = 0, total_bytes

    def progress(self, num_bytes: int) -> None:
        """Add to the number of fetched bytes."""
        with self._lock:
            self._done += num_bytes

    def end(self, phase: Phase, problem: str = "") -> None:
        """Report that this rank is restored, or has failed; does nothing if it has ended already."""
        client, self._client = self._client, None
        if client is None:
            return
        self._stop.set()
        self._reporter.join()
        self.enter(phase)
        with closing(client):
            # The daemon may be back at the second try, and would wait for this rank.
            any(self._report(client, problem) for _ in range(2))

    def _report_often(self, client: DaemonClient) -> None:
        # Often enough that the session does not expire between two reports.
        while not self._stop.wait(min(_REPORT_S, self._config.peer_timeout_s / 4)):
            self._report(client)

    def _report(self, client: DaemonClient, problem: str = "") -> bool:
        with self._lock:
            phase, done, total = self._phase, self._done, self._total
        try:
            client.report_restore(self._id, self._rank, phase, done, total, problem)
        except CkptError as error:
            logger.warning("cannot report progress to the daemon: %s", error)
            return False
        return True
