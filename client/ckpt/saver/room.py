"""Room: what to do when the near store is full, with its disk or with the bytes that a run may have there.

`on_busy` decides: a save waits until the carrier has made room, or it is skipped. What is committed near is never
deleted to make room.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ckpt.saver.messages import Setup
from ckptstore import human
from ckptstore.errors import SaveSkipped, StoreFull
from ckptstore.run import Run
from ckptstore.tiers.carrying import queued

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_LOOK_S = 0.2
_IDLE_S = 10.0
"""How long nothing has to be carried before a wait is hopeless: the carrier deletes just after it has carried."""


class Room:
    """The room of one run in its near store. For the uploading thread; `end` for any."""

    def __init__(self, near: Run, setup: Setup) -> None:
        self._near = near
        self._limit = setup.near_bytes
        self._waits = setup.on_busy == "wait"
        self._patience_s = setup.retry_s
        self._ending_since: float | None = None

    def end(self) -> None:
        """The trainer has ended: waits last at most `retry_s` from now on."""
        self._ending_since = self._ending_since or time.monotonic()

    def fit(self, num_bytes: int, write: Callable[[], _T]) -> _T:
        """The result of writing this many bytes, when there is room. A write that finds none is tried again.

        Raises SaveSkipped, or StoreFull if waiting is not asked for, or is hopeless; and the errors of `write`.
        """
        idle_since: float | None = None
        warned = False
        while True:
            full = self._lacks(num_bytes)
            if full is None:
                try:
                    return write()
                except StoreFull as error:
                    full = error
            if not self._waits:
                raise SaveSkipped(f"the save was skipped: {full.message}") from full
            now = time.monotonic()
            idle_since = None if queued(self._near) else idle_since or now
            if idle_since is not None and now - idle_since > _IDLE_S:
                raise full
            if self._ending_since is not None and now - self._ending_since > self._patience_s:
                raise full
            if not warned:
                logger.warning("a save waits until checkpoints are carried: %s", full.message)
                warned = True
            time.sleep(_LOOK_S)

    def _lacks(self, num_bytes: int) -> StoreFull | None:
        if self._limit is None:
            return None
        used = sum(info.bytes for info in self._near.store.list(self._near.keys.attempts))
        if used + num_bytes <= self._limit:
            return None
        return StoreFull(
            f"run {self._near.name!r} has {human.size(used)} of at most {human.size(self._limit)} in "
            f"{self._near.store.url}, and the save needs up to {human.size(num_bytes)}",
            "Allow more bytes near, or keep fewer checkpoints there; see why the far store does not answer",
        )
