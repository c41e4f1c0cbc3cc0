from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptstore.commits.audit import read_log
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.labels import MAX_LABELS, LabelChange, change_labels, label_versions, with_labels
from ckptstore.errors import InvalidRequest, NoCheckpoint, StoreUnavailable
from ckptstore.format.records import Action, Policy
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.pruning import plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store, WrappedStore, open_store
from tests.support.checkpoints import SMALL, at_every_call, write_checkpoint
from tests.support.stores import race


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    store = open_store(str(tmp_path))
    for step in (1, 2, 3):
        write_checkpoint(store, "gpt", step, SMALL)
    return store


def change(store: Store, checkpoint: Checkpoint, **parts: Any) -> None:
    change_labels(Run(store, "gpt", by="ann"), checkpoint.attempt, LabelChange(**parts))


def only(store: Store, step: int) -> Checkpoint:
    return next(c for c in StoreSource(store).checkpoints("gpt") if c.step == step)


def test_tags_and_metrics_are_set_changed_and_removed(folder_store: Store) -> None:
    run, first = Run(folder_store, "gpt"), only(folder_store, 1)
    change(folder_store, first, tags={"paper": "", "owner": "ann"}, metrics={"val_loss": 2.5, "loss": 9.0})
    change(folder_store, first, tags={"owner": "bob", "paper": None}, metrics={"val_loss": 2.25, "loss": None})
    assert only(folder_store, 1).tags == {"owner": "bob"}
    assert only(folder_store, 1).metrics == {**first.metrics, "val_loss": 2.25}
    assert StoreSource(folder_store).latest("gpt").tags == {}
    assert [len(versions) for versions in label_versions(run).values()] == [1]
    said = [(record.action, record.by, record.reason) for record in read_log(run)]
    assert said == [
        (Action.LABEL, "ann", "owner=bob, paper-, val_loss=2.25, loss-"),
        (Action.LABEL, "ann", "paper=, owner=ann, val_loss=2.5, loss=9.0"),
    ]


def test_retention_goes_by_metrics_that_were_set_later(folder_store: Store) -> None:
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
        change(folder_store, only(folder_store, step), metrics={"val_loss": loss})
    policy = Policy(keep_best=("val_loss:min:1",))
    plan = plan_prune(Run(folder_store, "gpt"), policy)
    assert sorted(verdict.checkpoint.step for verdict in plan.keep) == [2, 3]


def test_changes_at_the_same_time_all_count(folder_store: Store) -> None:
    first, names = only(folder_store, 1), [f"tag{i}" for i in range(8)]
    results = race(*(partial(change, folder_store, first, tags={name: "x"}) for name in names))
    assert (results, only(folder_store, 1).tags) == ([None] * len(names), dict.fromkeys(names, "x"))


def test_two_changes_at_any_moment_of_a_third_all_count(store: Store) -> None:
    def set_up(store: Store) -> Checkpoint:
        checkpoint = write_checkpoint(store, "gpt", 1, SMALL)
        change(store, checkpoint, tags={"before": ""})
        return checkpoint

    def two_others(first: Checkpoint) -> None:
        change(store, first, tags={"a": "1"})
        change(store, first, tags={"b": "2"})

    third = partial(change, tags={"c": "3"})
    for _ in at_every_call(store, set_up, third, two_others, more_than=6):
        assert only(store, 1).tags == {"a": "1", "b": "2", "before": "", "c": "3"}
        assert [len(versions) for versions in label_versions(Run(store, "gpt")).values()] == [1]


class _LosesReplies(WrappedStore):
    """Creates what it is asked to create, and reports that another process did."""

    def put_if_absent(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        super().put_if_absent(key, data)
        return False


def test_a_lost_reply_is_no_failure(folder_store: Store) -> None:
    change(_LosesReplies(folder_store), only(folder_store, 1), tags={"paper": "1"})
    assert only(folder_store, 1).tags == {"paper": "1"}


def test_what_is_being_deleted_takes_no_labels_and_leaves_none(folder_store: Store) -> None:
    run = Run(folder_store, "gpt")
    first, second, _ = reversed(list_checkpoints(run))
    change(folder_store, first, tags={"paper": "1"})
    delete_checkpoint(Run(folder_store, first.run), first.attempt, "test")
    assert label_versions(run) == {}
    delete_checkpoint(Run(folder_store, second.run), second.attempt, "test", grace_s=1000.0)
    for gone in (first, second):
        with pytest.raises(NoCheckpoint):
            change(folder_store, gone, tags={"late": ""})
    assert first.attempt not in label_versions(run)


def test_damaged_labels_hide_nothing_else(folder_store: Store, tmp_path: Path) -> None:
    change(folder_store, only(folder_store, 1), tags={"paper": "1"})
    change(folder_store, only(folder_store, 2), tags={"paper": "2"})
    (damaged,) = (tmp_path / "gpt" / "labels").glob("000000000001-*.json")
    damaged.write_bytes(damaged.read_bytes().replace(b"paper", b"pap3r"))
    (tmp_path / "gpt" / "labels" / "note.txt").write_text("not ours")
    assert [c.tags for c in StoreSource(folder_store).checkpoints("gpt")] == [{}, {"paper": "2"}, {}]


def test_labels_that_make_no_sense_change_nothing(folder_store: Store) -> None:
    first = only(folder_store, 1)
    wrong: list[dict[str, Any]] = [
        {"tags": {"": "x"}}, {"tags": {"-a": "x"}}, {"tags": {"a" * 65: "x"}}, {"tags": {"a": "x\n"}},
        {"tags": {"a": "x" * 257}}, {"metrics": {"a": math.nan}}, {"metrics": {"a b": 1.0}},
        {"tags": {f"t{i}": "" for i in range(MAX_LABELS + 1)}},
    ]  # fmt: skip
    for parts in wrong:
        with pytest.raises(InvalidRequest):
            change(folder_store, first, **parts)
    assert label_versions(Run(folder_store, "gpt")) == {}


def test_a_listing_reads_only_what_is_labelled(folder_store: Store) -> None:
    change(folder_store, only(folder_store, 2), tags={"paper": ""})

    class OnlyLabels(WrappedStore):
        def get(self, key: str) -> bytes:
            if "/labels/" not in key:
                raise StoreUnavailable(key)
            reads.append(key)
            return super().get(key)

    reads: list[str] = []
    found = with_labels(Run(OnlyLabels(folder_store), "gpt"), list_checkpoints(Run(folder_store, "gpt")))
    assert ([c.tags for c in found], len(reads)) == ([{}, {"paper": ""}, {}], 1)
