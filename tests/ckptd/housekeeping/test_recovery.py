from __future__ import annotations

from ckptd.housekeeping.recovery import Recovery
from ckptstore.names import Attempt, new_ulid
from ckptstore.stores import Store
from tests.support.checkpoints import write_rank
from tests.support.stores import MovableClock


def test_a_live_committer_is_given_time(store: Store) -> None:
    clock = MovableClock()
    recovery, attempt = Recovery(store, clock, 50), Attempt(1, new_ulid(clock()))
    write_rank(store, "gpt", attempt, {}, 0, world_size=2)
    assert recovery.advance_run("gpt") == []
    clock.advance(60)
    assert recovery.advance_run("gpt") == []
    write_rank(store, "gpt", attempt, {}, 1, world_size=2)
    assert recovery.advance_run("gpt") == []
    clock.advance(20)
    assert recovery.advance_run("gpt") == []
    clock.advance(40)
    assert (recovery.advance_run("gpt"), recovery.advance_run("gpt")) == ([attempt], [])
