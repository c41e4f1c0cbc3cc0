from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ckptapi.opening import open_source
from ckptstore.commits.catalog import (
    Checkpoint,
    State,
    find,
    latest,
    list_checkpoints,
    list_runs,
    newest_first,
    supersede,
    with_states,
)
from ckptstore.commits.generations import Lineage
from ckptstore.errors import InvalidRequest, NoCheckpoint
from ckptstore.names import Attempt, Reference, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import MovableClock


@dataclass(frozen=True)
class BegunGeneration:
    parent: str | None


SMALL = {"model/a": np.arange(10)}


def write(store: Store, step: int, run: str = "gpt", ahead_s: float = 0.0) -> Checkpoint:
    return write_checkpoint(store, run, step, SMALL, metrics={"loss": step / 2}, clock=MovableClock(ahead_s))


def test_a_listing_equals_the_outcomes(store: Store) -> None:
    written = write(store, 3)
    (listed,) = list_checkpoints(Run(store, "gpt"))
    assert listed == written
    assert (listed.step, listed.run, listed.world_size, listed.num_entries, listed.num_shards) == (3, "gpt", 1, 1, 1)
    assert (listed.raw_bytes, listed.metrics, listed.state) == (80, {"loss": 1.5}, State.COMMITTED)
    assert 0 < listed.stored_bytes <= 80
    assert listed.save_seconds == listed.committed_at - listed.created_at >= 0
    assert listed.id == f"gpt@3.{listed.attempt.ulid}"


@pytest.mark.parametrize("store", ["local", "memory", "s3"], indirect=True)
def test_latest_is_the_highest_step_not_the_last_write(store: Store) -> None:
    run = Run(store, "gpt")
    for step in (5, 100, 20):
        write(store, step)
    assert (latest(run).step, [c.step for c in list_checkpoints(run)]) == (100, [100, 20, 5])
    assert [c.step for c in newest_first(run)] == [100, 20, 5]


def test_runs_do_not_see_each_other(store: Store) -> None:
    write(store, 1, "gpt")
    write(store, 9, "gpt-2", ahead_s=10)
    write(store, 2, "a")
    store.put("not a run!/x", b"")
    assert (list_runs(store), latest(Run(store, "gpt")).step) == (["a", "gpt", "gpt-2"], 1)
    source = StoreSource(store)
    with pytest.raises(InvalidRequest, match="several: a, gpt, gpt-2"):
        source.latest()
    assert source.runs() == ["a", "gpt", "gpt-2"]
    with pytest.raises(NoCheckpoint, match="'other'"):
        source.latest("other")
    with pytest.raises(NoCheckpoint, match="no run"):
        StoreSource(type(store)(f"{store.url[7:]}-empty")).latest()  # type: ignore[call-arg]


def test_of_one_step_the_later_commit_counts_even_on_another_clock(store: Store) -> None:
    run, late = Run(store, "gpt"), write(store, 5, ahead_s=100)
    early = write(store, 5)
    assert [(c.attempt, c.state) for c in list_checkpoints(run)] == [
        (late.attempt, State.COMMITTED),
        (early.attempt, State.SUPERSEDED),
    ]
    assert (list(newest_first(run)), find(store, Reference.parse("gpt@5"))) == ([late], late)
    assert find(store, Reference.parse(early.id)).attempt == early.attempt, "by its full id it is still found"


def test_a_corrupt_outcome_is_shown_and_never_latest(store: Store) -> None:
    run = Run(store, "gpt")
    good, bad = write(store, 1), write(store, 2)
    store.put(run.keys.outcome(bad.attempt), b"noise")
    listed = list_checkpoints(run)
    assert [(c.step, c.state) for c in listed] == [(2, State.CORRUPT), (1, State.COMMITTED)]
    assert "checksum" in listed[0].problem
    assert latest(run) == good
    assert find(store, Reference.parse("gpt@2")).state is State.CORRUPT, "asked for by name, it is shown as it is"


def test_references(store: Store) -> None:
    first, second = write(store, 1), write(store, 2)
    assert find(store, Reference.parse("gpt@latest")) == second
    assert find(store, Reference.parse("gpt@1")) == first
    assert find(store, Reference.parse(second.id)) == second
    for missing in ("gpt@3", "gpt@1." + second.attempt.ulid, "other@latest", "other@1"):
        with pytest.raises(NoCheckpoint):
            find(store, Reference.parse(missing))
    delete_checkpoint(Run(store, first.run), first.attempt, "test")
    for gone in ("gpt@1", first.id):
        with pytest.raises(NoCheckpoint):
            find(store, Reference.parse(gone))


def test_foreign_objects_are_no_checkpoints(store: Store, tmp_path: Path) -> None:
    write(store, 1)
    for key in ("README.md", "000000000002-nonsense.json", "2.json", f"{Attempt(3, new_ulid(0))}.json.bak"):
        store.put(f"gpt/commits/{key}", b"noise")
    assert [c.step for c in list_checkpoints(Run(store, "gpt"))] == [1]
    assert open_source(store.url).latest("gpt").step == 1


def checkpoint(step: int, state: State = State.COMMITTED, at: float = 0.0) -> Checkpoint:
    # The later commit has the older ULID: captured first, and slow to upload.
    return Checkpoint("gpt", Attempt(step, new_ulid(1000 - at)), state, committed_at=at)


def test_supersede_prefers_the_later_commit_and_leaves_the_corrupt() -> None:
    a, b, c = checkpoint(1, at=1.0), checkpoint(1, at=3.0), checkpoint(1, State.CORRUPT)
    assert [(x.attempt, x.state) for x in supersede([a, c, b])] == [
        (b.attempt, State.COMMITTED), (a.attempt, State.SUPERSEDED), (c.attempt, State.CORRUPT),
    ]  # fmt: skip
    assert supersede([]) == []


def test_parents_of_many_abandoned_generations_are_looked_up_once() -> None:
    """Each generation continues from the first of two checkpoints of the one before."""
    saved = {n: [Attempt(n + more, new_ulid(n), generation=n) for more in (0, 9)] for n in range(1, 101)}
    asked: list[int] = []

    def parent_of(number: int) -> BegunGeneration:
        asked.append(number)
        return BegunGeneration(str(saved[number - 1][0]) if number > 1 else None)

    listed = [Checkpoint("gpt", a, State.COMMITTED) for n in reversed(saved) for a in reversed(saved[n])]
    found = with_states(listed, Lineage(parent_of), dict.fromkeys(saved, 7.0))
    assert [c.abandoned_at for c in found] == [None, None, *([7.0, None] * 99)]
    assert len(asked) <= 2 * len(saved)
