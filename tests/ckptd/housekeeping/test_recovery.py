from __future__ import annotations

from ckptd.housekeeping.recovery import Recovery
from ckptd.index import Database, Index
from ckptd.metrics import Metrics
from ckptstore.names import Attempt, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_rank
from tests.support.stores import MovableClock


def test_a_live_committer_is_given_time(store: Store, database: Database) -> None:
    clock = MovableClock()
    recovery = Recovery(store, Index(database), Metrics(), clock, 50, lambda *_: None)
    run, attempt = Run(store, "gpt", clock), Attempt(1, new_ulid(clock()))
    write_rank(store, "gpt", attempt, {}, 0, world_size=2)
    assert recovery.advance_run(run) == []
    clock.advance(60)
    assert recovery.advance_run(run) == []
    write_rank(store, "gpt", attempt, {}, 1, world_size=2)
    assert recovery.advance_run(run) == []
    clock.advance(20)
    assert recovery.advance_run(run) == []
    clock.advance(40)
    assert (recovery.advance_run(run), recovery.advance_run(run)) == ([attempt], [])
