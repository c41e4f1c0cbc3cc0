"""A Keeper: limits are applied when a save is durable, in steps that the guard of prunes allows; errors are logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ckpt import Checkpointer
from ckpt.integrations.keeping import Keeper
from ckptstore.format.records import Policy
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store
from ckptstore.stores.base import ObjectInfo, WrappedStore

MODEL = torch.nn.Linear(1, 1)


def save(checkpointer: Checkpointer, keeper: Keeper, step: int) -> list[int]:
    """The steps that are left when the keeper has seen to this save."""
    keeper.saved(checkpointer.save_async(MODEL, None, step))
    keeper._thread.submit(lambda: None).result()
    return sorted(one.step for one in StoreOperator(open_store(checkpointer.config.source)).checkpoints("gpt"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Of the keeper: a loader of another test may still live, and be reported."""
    return [one for one in caplog.records if one.levelno >= logging.WARNING and one.name == "ckpt.integrations.keeping"]


def test_a_limit_on_a_long_run_takes_effect_within_few_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), run="gpt", writer="thread", max_references=0) as checkpointer:
        for step in range(30):
            checkpointer.save(MODEL, None, step)
        keeper = Keeper(checkpointer.config, Policy(keep_last=1))
        left = [save(checkpointer, keeper, step) for step in (30, 31, 32)]
        keeper.close()
    assert left == [[27, 28, 29, 30], [31], [32]]
    assert [record.message for record in warnings(caplog)] == [
        "run gpt has 31 checkpoints, and 1 are to be kept: 27 are deleted now, and more with the next saves"
    ]


class Failing(WrappedStore):
    """A store whose listings fail once, with an error that is none of ours."""

    failed = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not self.failed:
            self.failed = True
            raise RuntimeError("the library of the store is broken")
        return super().list(prefix)


def test_a_foreign_error_is_logged_and_the_next_save_prunes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(str(tmp_path), run="gpt", writer="thread", max_references=0) as checkpointer:
        keeper = Keeper(checkpointer.config, Policy(keep_last=1))
        save(checkpointer, keeper, 1)
        keeper._operator = StoreOperator(Failing(open_store(str(tmp_path))))
        assert (save(checkpointer, keeper, 2), save(checkpointer, keeper, 3)) == ([1, 2], [3])
        keeper.close()
    [record] = warnings(caplog)
    assert record.message == "run gpt is not pruned"
    assert record.exc_text is not None
    assert "the library of the store is broken" in record.exc_text
