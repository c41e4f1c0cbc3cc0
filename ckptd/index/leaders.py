"""Leader election: one row per task. Every method is one transaction and may be called from any thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import Connection, insert, select, update

from ckptd.index.database import Database, retried
from ckptd.index.tables import leaders
from ckptstore.errors import LeadershipLost


class Tenure(NamedTuple):
    """A snapshot of the row. The row changes with every heartbeat of the holder."""

    holder: str
    """Empty if there is no leader."""
    epoch: int
    renewals: int


@dataclass
class LeaderIndex:
    """The row of one task. Each holder has a unique name."""

    _database: Database
    _task: str

    def __post_init__(self) -> None:
        self._same = leaders.c.task == self._task

    @retried
    def look(self) -> Tenure:
        """The current row; created if missing."""
        with self._database.write() as connection:
            row = connection.execute(select(leaders).where(self._same)).one_or_none()
            if row is not None:
                return Tenure(row.holder, row.epoch, row.renewals)
            values = {"task": self._task, "holder": "", "epoch": 0, "renewals": 0}
            connection.execute(insert(leaders).values(values))
            return Tenure("", 0, 0)

    def claim(self, holder: str, seen: Tenure) -> int | None:
        """Take over from a holder without a heartbeat since `seen`. Returns the new epoch; None if there was one."""
        c = leaders.c
        unchanged = (self._same, c.holder == seen.holder, c.epoch == seen.epoch, c.renewals == seen.renewals)
        taken = update(leaders).where(*unchanged).values(holder=holder, epoch=seen.epoch + 1, renewals=0)
        return seen.epoch + 1 if self._database.change(taken) else None

    @retried
    def renew(self, holder: str) -> int | None:
        """Write a heartbeat. Returns the epoch of the holder, None if another daemon has taken over."""
        mine = (self._same, leaders.c.holder == holder)
        renewed = update(leaders).where(*mine).values(renewals=leaders.c.renewals + 1).returning(leaders.c.epoch)
        with self._database.write() as connection:
            epoch: int | None = connection.scalar(renewed)
            return epoch

    def resign(self, holder: str) -> None:
        """Give the lead away immediately."""
        mine = (self._same, leaders.c.holder == holder)
        self._database.change(update(leaders).where(*mine).values(holder="", renewals=0))

    @retried
    def fence(self, connection: Connection, holder: str, epoch: int) -> None:
        """Raise LeadershipLost unless the epoch is the holder's. No other epoch can begin during the transaction."""
        mine = (self._same, leaders.c.holder == holder, leaders.c.epoch == epoch)
        if connection.execute(select(leaders.c.epoch).where(*mine).with_for_update(read=True)).first() is None:
            raise LeadershipLost(f"epoch {epoch} of {self._task} has ended: another daemon leads")
