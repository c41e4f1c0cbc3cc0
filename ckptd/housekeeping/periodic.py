"""Repeated work in a thread, until it is stopped."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ckptstore.errors import CkptError

_LOG = logging.getLogger(__name__)
_ASK_AGAIN_S = 0.5


class Periodic:
    """Calls `work` at once and then `every_s` seconds after it last ended. An error is logged; the next call comes.

    when: a call that is due waits until this says yes.
    """

    def __init__(
        self, name: str, work: Callable[[], None], every_s: float, when: Callable[[], bool] = lambda: True
    ) -> None:
        self._work = work
        self._every_s = every_s
        self._when = when
        self._stop = threading.Event()
        # A daemon thread: a store that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ask the thread to end, and wait for it no longer than `timeout_s`. Cut short, it has broken nothing."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stop.is_set():
            if not self._when():
                self._stop.wait(min(self._every_s, _ASK_AGAIN_S))
                continue
            try:
                self._work()
            except CkptError as error:
                _LOG.warning("%s failed: %s", self._thread.name, error)
            except Exception:
                _LOG.exception("%s failed", self._thread.name)
            self._stop.wait(self._every_s)
