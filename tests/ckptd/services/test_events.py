from __future__ import annotations

import json

from ckptapi.bodies import EventBody, EventKind
from ckptd.index import Database, EventLog, Index
from ckptd.services.events import Events
from ckptstore.clock import system_clock
from ckptstore.names import new_ulid
from tests.conftest import on_both


class _Busy(EventLog):
    """Another event is recorded after each look at the newest one."""

    def bounds(self) -> tuple[int, int]:
        found = super().bounds()
        self.add(EventBody(kind=EventKind.COMMITTED, run="gpt"))
        return found


class _NoRestores:
    def find(self, id: str) -> None:
        return None


@on_both
def test_events_of_other_daemons_on_the_database_wake_waiters(database: Database) -> None:
    Index(database).adopt("file:///store", 0.0)
    woken: list[str] = []
    ours, theirs = EventLog(database, system_clock), EventLog(database, system_clock)
    events = Events(ours, _NoRestores(), woken.append)  # type: ignore[arg-type]
    committed = EventBody(kind=EventKind.COMMITTED, run="gpt", checkpoint=f"gpt@1.{new_ulid(0)}")
    theirs.add(committed)
    assert woken == []
    events.follow(lambda: woken.append("refreshed"))
    assert woken[0] == "refreshed", "what wakes finds the new state"
    assert {"events", "checkpoints", "checkpoints/gpt"} == set(woken[1:])
    woken.clear()
    events.follow(lambda: theirs.add(committed))
    assert woken == [], "the refresh may have missed it"
    events.follow(lambda: None)
    assert "checkpoints/gpt" in woken


@on_both
def test_old_events_are_dropped_and_the_gap_is_reported(database: Database) -> None:
    Index(database).adopt("file:///store", 0.0)
    now = [1000.0]
    log = EventLog(database, lambda: now[0])
    for step in range(10):
        log.add(EventBody(kind=EventKind.COMMITTED, run="gpt", detail={"step": step}))
        now[0] -= 50  # a clock that runs backwards does not turn the order
    ids = [event.id for event in log.after(0, 100)]
    assert ids == sorted(set(ids))
    log.trim(3)
    assert [event.detail["step"] for event in log.after(0, 100)] == [7, 8, 9]
    events = Events(log, _NoRestores(), lambda _: None)  # type: ignore[arg-type]
    assert events.page(ids[2]).gap
    assert not events.page(ids[6]).gap
    assert json.loads(json.dumps(events.page(ids[9]).last_id)) == ids[9]


@on_both
def test_an_event_that_comes_between_two_queries_is_on_one_page(database: Database) -> None:
    Index(database).adopt("file:///store", 0.0)
    events = Events(_Busy(database, system_clock), _NoRestores(), lambda _: None)  # type: ignore[arg-type]
    first = events.page(0)
    second = events.page(first.last_id)
    assert [len(first.items), len(second.items)] == [2, 1]
    assert second.items[0].id > first.items[-1].id
