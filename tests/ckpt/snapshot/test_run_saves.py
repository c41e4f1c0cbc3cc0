from __future__ import annotations

import gc
import weakref

import pytest

from ckpt.snapshot.handle import LiveHandle
from ckpt.snapshot.run_saves import TrainerSession
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidRequest, SaveFailed, Superseded
from ckptstore.names import Attempt, new_ulid

AGREED = new_ulid(1e9)


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint("gpt", Attempt(step, new_ulid(2e9)), State.COMMITTED)


def save(session: TrainerSession, step: int) -> LiveHandle:
    session.check(step)
    handle = LiveHandle(step, 0, 0.0)
    session.saved(handle)
    return handle


def test_all_ranks_derive_the_same_attempts() -> None:
    ranks, resumed = [TrainerSession("gpt") for _ in range(2)], checkpoint(300)
    before = [rank.new_attempt(AGREED, 1) for rank in ranks]
    again = [rank.new_attempt(AGREED, 1) for rank in ranks]
    for rank in ranks:
        rank.restored(resumed, trains=True)
    after = [rank.new_attempt(AGREED, 1) for rank in ranks]
    for both in (before, again, after):
        assert both[0] == both[1]
    assert len({one.ulid for one in (before[0], again[0], after[0])}) == 3
    assert (before[0].session, after[0].session.parent) == (again[0].session, resumed.attempt)
    assert after[0].session.id != before[0].session.id


def test_a_step_is_saved_once_unless_its_save_failed() -> None:
    session = TrainerSession("gpt")
    first = save(session, 1)
    with pytest.raises(InvalidRequest, match="step 1"):
        session.check(1)
    first.fail(SaveFailed("no space"))
    save(session, 1).succeed(checkpoint(1))
    with pytest.raises(InvalidRequest, match="step 1"):
        session.check(1)
    second = save(session, 3)
    with pytest.raises(InvalidRequest, match="step 3"):
        session.check(2)
    second.fail(SaveFailed("no space"))
    session.check(2)
    session.restored(checkpoint(1), trains=True)
    session.check(1)


def test_a_superseded_session_ends_with_a_restore() -> None:
    session = TrainerSession("gpt")
    save(session, 1).fail(Superseded("generation 2 has begun"))
    for step in (2, 3):
        with pytest.raises(Superseded):
            session.check(step)
    session.restored(checkpoint(1), trains=True)
    session.check(2)


def test_saves_that_have_ended_are_released() -> None:
    session = TrainerSession("gpt")
    ended = save(session, 1)
    ended.succeed(checkpoint(1))
    known = weakref.ref(ended)
    del ended
    session.check(2)
    gc.collect()
    assert known() is None
