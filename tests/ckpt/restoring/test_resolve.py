"""The choice of a checkpoint while the saver of a killed trainer commits."""

from __future__ import annotations

from functools import partial
from itertools import count
from pathlib import Path

import pytest

from ckpt import Checkpointer
from ckpt.config import Config
from ckpt.restoring.resolve import candidates
from ckptstore.clock import system_clock
from ckptstore.commits.commit import roll_forward
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import SMALL, write_checkpoint, write_rank
from tests.support.stores import FaultyStore, Interleaving


def test_a_commit_at_any_moment_is_not_missed(tmp_path: Path) -> None:
    for at in count():
        url = str(tmp_path / str(at))
        store = open_store(url)
        write_checkpoint(store, "r", 3, SMALL)
        attempt = Attempt(6, new_ulid(system_clock()))
        write_rank(store, "r", attempt, SMALL)
        other = Interleaving(at, partial(roll_forward, Run(store, "r"), attempt))
        newest = next(candidates(StoreSource(FaultyStore(store, other)), Config(url, run="r"), Reference("r", None)))
        assert newest.attempt == attempt, f"the saver committed before call {at} of {other.calls}"
        if len(other.calls) <= at:
            return


@pytest.mark.parametrize(
    ("run", "warned"), [("gpt-smal-1", True), ("GPT-small-1", True), ("gpt-small-2", False), ("bert", False)]
)
def test_a_mistyped_run_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture, run: str, warned: bool) -> None:
    with Checkpointer(str(tmp_path), run="gpt-small-1", writer="thread") as checkpointer:
        checkpointer.save(None, None, 1, epoch=1)
    with Checkpointer(str(tmp_path), run=run, writer="thread") as checkpointer:
        assert checkpointer.restore(epoch=0) is None
    assert ("Did you mean run 'gpt-small-1'?" in caplog.text) == warned
