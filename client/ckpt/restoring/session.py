"""The daemon's view of a restore: one session for all ranks, with each rank's progress, and a final barrier.

A session is informational: the ranks themselves agree on the checkpoint, and on whether the restore succeeded.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

from ckpt.config import Config
from ckptapi.bodies import Phase, RestoreState
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, RankLost

if TYPE_CHECKING:
    from ckptapi.client import DaemonClient

logger = logging.getLogger(__name__)

_REPORT_S = 2.0
_WAIT_S = 30.0


class RestoreSession:
    """This rank's part in one session; without `join`, it reports nothing. `progress` may be called from any thread."""

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
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
        try:
            body = client.join_restore(
                checkpoint.run, key, self._world_size, self._rank,
                checkpoint=checkpoint.id, ttl_s=max(1.0, self._config.peer_timeout_s), host=socket.gethostname(),
            )  # fmt: skip
        except CkptError as error:
            logger.warning("restoring without a session at the daemon: %s", error)
            client.close()
            return
        self._client, self._id = client, body.id
        name = "ckpt-restore-session"
        self._reporter = threading.Thread(target=self._report_often, args=(client,), name=name, daemon=True)
        self._reporter.start()

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

    def fail(self, error: BaseException) -> None:
        """Report that this rank failed: the session ends, unless it has ended already."""
        client, self._client = self._client, None
        if client is not None:
            with closing(client):
                self._end(client, Phase.FAILED, str(error))

    def finish(self) -> None:
        """Report that this rank is restored, and wait for the others. Raises RankLost if one is late or has failed."""
        client, self._client = self._client, None
        if client is None:
            return
        with closing(client):
            try:
                if not self._end(client, Phase.RESTORED):
                    # The daemon may be back by now, and would wait for this rank.
                    self._report(client)
                self._wait(client)
            except RankLost:
                raise
            except CkptError as error:
                logger.warning("cannot find out from the daemon whether all ranks are restored: %s", error)

    def _wait(self, client: DaemonClient) -> None:
        timeout_s = self._config.peer_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            body = client.restore_session(self._id, min(_WAIT_S, timeout_s), ranks=False)
            if body.num_restored == body.world_size:
                return
            if body.state is not RestoreState.RESTORING:
                raise RankLost(f"restore session {self._id} ended: {body.problem}", "Restart the job")
            if time.monotonic() > deadline:
                raise RankLost(
                    f"restore session {self._id}: only {body.num_restored} of {body.world_size} ranks are restored "
                    f"after {timeout_s:.0f} s",
                    f"ckptctl restores {self._id} shows which are behind",
                )

    def _end(self, client: DaemonClient, phase: Phase, problem: str = "") -> bool:
        """End the reports with this one. Returns False if it did not reach the daemon."""
        self._stop.set()
        self._reporter.join()
        self.enter(phase)
        return self._try_report(client, problem)

    def _report_often(self, client: DaemonClient) -> None:
        # Often enough that the session does not expire between two reports.
        while not self._stop.wait(min(_REPORT_S, self._config.peer_timeout_s / 4)):
            self._try_report(client)

    def _try_report(self, client: DaemonClient, problem: str = "") -> bool:
        try:
            self._report(client, problem)
        except CkptError as error:
            logger.warning("cannot report progress to the daemon: %s", error)
            return False
        return True

    def _report(self, client: DaemonClient, problem: str = "") -> None:
        with self._lock:
            phase, done, total = self._phase, self._done, self._total
        client.report_restore(self._id, self._rank, phase, done, total, problem)
