"""A restore as the daemon sees it: one session for all ranks, with the progress of each, and an end that all wait for.

It is company, not authority: which checkpoint is restored, and whether it went well, the ranks agree on themselves.
"""

from __future__ import annotations

import logging
import threading
import time

from ckpt.config import Config
from ckptstore.catalog import Checkpoint
from ckptstore.daemon import DaemonClient
from ckptstore.errors import CkptError, RankLost, Unavailable
from ckptstore.wire import Phase, RestoreState

logger = logging.getLogger(__name__)

_REPORT_S = 2.0
_WAIT_S = 30.0


class RestoreSession:
    """This rank's part in one session. `progress` may be called from any thread."""

    def __init__(self, client: DaemonClient, id: str, rank: int, timeout_s: float) -> None:
        self._client = client
        self.id = id
        self._rank = rank
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._phase, self._done, self._total = Phase.PLANNING, 0, 0
        self._stop = threading.Event()
        self._reporter = threading.Thread(target=self._report_often, name="ckpt-restore-session", daemon=True)
        self._reporter.start()

    @staticmethod
    def join(config: Config, checkpoint: Checkpoint, key: str, rank: int, world_size: int) -> RestoreSession | None:
        """Join the session `key`; None, with a warning, if the daemon cannot have one."""
        assert config.daemon is not None
        client = DaemonClient(config.daemon, config.token)
        try:
            body = client.join_restore(
                checkpoint.run, key, world_size, rank, checkpoint=checkpoint.id, ttl_s=max(1.0, config.peer_timeout_s)
            )
        except CkptError as error:
            logger.warning("restoring without a session at the daemon: %s", error)
            client.close()
            return None
        return RestoreSession(client, body.id, rank, config.peer_timeout_s)

    def enter(self, phase: Phase, total_bytes: int | None = None) -> None:
        """Say what this rank does now."""
        with self._lock:
            self._phase = phase
            if total_bytes is not None:
                self._total = total_bytes

    def progress(self, num_bytes: int) -> None:
        """So many bytes more are fetched."""
        with self._lock:
            self._done += num_bytes

    def fail(self, error: BaseException) -> None:
        """This rank cannot go on; the session ends."""
        self._end(Phase.FAILED, str(error))

    def finish(self) -> None:
        """This rank is restored; return when all are. Raises RankLost if one is not, in time."""
        self._end(Phase.RESTORED)
        deadline = time.monotonic() + self._timeout_s
        try:
            while time.monotonic() < deadline:
                body = self._client.restore_session(self.id, min(_WAIT_S, self._timeout_s), ranks=False)
                if body.state is RestoreState.RESTORED:
                    return
                if body.state is not RestoreState.RESTORING:
                    raise RankLost(f"restore session {self.id} ended: {body.problem}", "Restart the job")
                if body.num_restored == body.world_size:
                    return
        except Unavailable as error:
            if isinstance(error, RankLost):
                raise
            logger.warning("the daemon did not say whether all ranks are restored: %s", error)
            return
        finally:
            self._client.close()
        raise RankLost(
            f"restore session {self.id}: only {body.num_restored} of {body.world_size} ranks are restored after "
            f"{self._timeout_s:.0f} s",
            f"ckptctl restores {self.id} shows which are behind",
        )

    def _end(self, phase: Phase, problem: str = "") -> None:
        self._stop.set()
        self._reporter.join()
        self.enter(phase)
        self._report(problem)

    def _report_often(self) -> None:
        while not self._stop.wait(_REPORT_S):
            self._report()

    def _report(self, problem: str = "") -> None:
        with self._lock:
            phase, done, total = self._phase, self._done, self._total
        try:
            self._client.report_restore(self.id, self._rank, phase, done, total, problem)
        except CkptError as error:
            logger.warning("the daemon did not take a progress report: %s", error)
