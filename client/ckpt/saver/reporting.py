"""Reporting: keeps the report of a near store's backlog in the far store, where the daemon reads it.

The carrier reports while it has the lock of its host, so that an older report never replaces a newer one there. The
report goes to the store that may be away; the carrier does not depend on it, and goes on if it cannot be written.
"""

from __future__ import annotations

import logging
import time

import msgspec

from ckptstore.commits.backlogs import REPORT_S, read_report, write_report
from ckptstore.errors import CkptError
from ckptstore.format.documents import FORMAT
from ckptstore.format.records import ORIGIN, BacklogReport
from ckptstore.run import Run, origin
from ckptstore.tiers.carrying import Backlog, Known, backlog
from ckptstore.tiers.source import near_id

logger = logging.getLogger(__name__)

_LONGEST_PROBLEM = 500


class BacklogReporter:
    """Reports what one near store has and the far store has not. For the thread of the carrier."""

    def __init__(self, near: Run, far: Run, known: Known) -> None:
        """known: what is known about checkpoints of the near store (ckptstore.tiers.carrying.backlog)."""
        self._near = near
        self._far = far
        self._outcomes = known
        self._problem = ""
        self._known: BacklogReport | None = None
        """The report in the far store; None: not read yet, or none."""
        self._looked = False
        self._written_at: float | None = None
        """When this process last reported a backlog that was not empty; None: it has not."""
        self._tried_at = 0.0
        self._failed = False

    def carried(self) -> None:
        """A checkpoint was carried, or cannot be: carrying works."""
        self._problem = ""

    def failed(self, error: Exception) -> None:
        """A try to carry a checkpoint failed."""
        self._problem = str(error)[:_LONGEST_PROBLEM]

    def copying(self) -> None:
        """A checkpoint is being copied, which may take long: report if that is due."""
        if time.monotonic() - self._tried_at >= REPORT_S:
            self.report(waiting=True)

    def report(self, waiting: bool) -> None:
        """Write the report if it is due. waiting: whether checkpoints are to be carried.

        That there are none is reported once, and at once. A backlog is reported once a minute, and when carrying begins
        to fail or to work: most are gone a moment later.
        """
        self._tried_at = time.monotonic()
        try:
            if not self._looked:
                self._known, self._looked = read_report(self._far, near_id(self._near.store, self._near.clock)), True
            if self._is_due(waiting):
                self._write(backlog(self._near, self._outcomes))
            self._failed = False
        except CkptError as error:
            if not self._failed:
                logger.warning("the backlog of run %s is not reported for now: %s", self._near.name, error)
            self._failed = True

    def _is_due(self, waiting: bool) -> bool:
        known = self._known
        if not waiting:
            return known is not None and known.checkpoints > 0
        if self._written_at is None or self._tried_at - self._written_at >= REPORT_S:
            return True
        return known is None or known.problem != self._problem

    def _write(self, found: Backlog) -> None:
        near, oldest = self._near, next(iter(found.attempts), None)
        report = BacklogReport(
            format=FORMAT, kind="backlog", run=near.name, near=near_id(near.store, near.clock), url=near.store.url,
            by=near.by, at=near.clock(), checkpoints=len(found.attempts), bytes=found.bytes, since=found.since,
            oldest=None if oldest is None else str(oldest), problem=self._problem if oldest is not None else "",
            extensions={ORIGIN: msgspec.to_builtins(origin())},
        )  # fmt: skip
        write_report(self._far, report)
        self._known = report
        if oldest is not None:
            self._written_at = self._tried_at
