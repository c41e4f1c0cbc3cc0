"""Silent damage: single flipped bits in every class of object of a checkpoint of several ranks. All are found."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.commits.commit import commit_attempt
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.checkpoints import flipped, write_checkpoint, write_rank

FLIPS_PER_CLASS = 140
WORLD = 3


def write(store: Store) -> Checkpoint:
    rng, attempt = np.random.default_rng(0), Attempt(2, new_ulid(system_clock()))
    receipts = [
        write_rank(
            store, "gpt", attempt,
            {f"r{rank}/w": (rng.standard_normal(2000) * 0.02).astype(np.float32), f"r{rank}/i": np.arange(100)},
            rank, WORLD, metrics={"loss": 0.5},
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    run = Run(store, "gpt")
    commit_attempt(run, receipts)
    return latest(run)


def kind(key: str) -> str:
    if "/commits/" in key:
        return "outcome"
    if "manifest" in key:
        return "manifest"
    return "shard" if key.endswith(".ckpt") else "receipt"


def detected(store: Store, original: Checkpoint) -> bool:
    """Damage must show in the listing, or in what verify says of the listed checkpoint; and never be latest unseen."""
    run = Run(store, "gpt")
    (listed,) = (c for c in list_checkpoints(run) if c.attempt == original.attempt)
    if listed.state is State.CORRUPT:
        return latest(run).attempt != original.attempt and not verify(StoreSource(store), listed).ok
    return not verify(StoreSource(store), listed, threads=1).ok


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_every_flipped_bit_is_detected(store: Store) -> None:
    write_checkpoint(store, "gpt", 1, {"model/a": np.arange(3)})
    checkpoint = write(store)
    assert verify(StoreSource(store), checkpoint).ok
    objects: dict[str, list[str]] = {}
    for info in store.list("gpt/"):
        if str(checkpoint.attempt) in info.key:
            objects.setdefault(kind(info.key), []).append(info.key)
    assert {name: len(keys) for name, keys in objects.items()} == {
        "shard": WORLD, "receipt": WORLD, "manifest": 1, "outcome": 1,
    }  # fmt: skip
    chance = random.Random(20_261_121)
    missed: list[tuple[str, int, int]] = []
    hit: Counter[str] = Counter()
    for name, keys in objects.items():
        for _ in range(FLIPS_PER_CLASS):
            key = chance.choice(keys)
            good = store.get(key)
            at, bit = chance.randrange(len(good)), chance.randrange(8)
            store.put(key, flipped(good, at, 1 << bit))
            hit[name] += 1
            if not detected(store, checkpoint):
                missed.append((key, at, bit))
            store.put(key, good)
            assert latest(Run(store, "gpt")) == checkpoint
    assert (hit.total(), missed) == (4 * FLIPS_PER_CLASS, [])
    assert verify(StoreSource(store), checkpoint).ok, "no false alarm once all bits are back"


def test_missing_and_truncated_objects_are_detected(store: Store) -> None:
    checkpoint = write(store)
    for info in list(store.list(RunKeys("gpt").attempt(checkpoint.attempt))):
        good = store.get(info.key)
        store.put(info.key, good[:-1])
        assert not verify(StoreSource(store), checkpoint).ok, f"{info.key} cut short"
        store.delete_many([info.key])
        report = verify(StoreSource(store), checkpoint)
        assert not report.ok, f"{info.key} missing"
        assert report.problems[0]
        store.put(info.key, good)
    report = verify(StoreSource(store), checkpoint)
    assert report.ok
    assert (report.num_chunks, report.stored_bytes) == (2 * WORLD, checkpoint.stored_bytes)


def test_a_report_names_every_damaged_object(store: Store) -> None:
    checkpoint = write(store)
    for rank in range(WORLD):
        key = RunKeys("gpt").shard(checkpoint.attempt, names.shard_name(rank))
        store.put(key, flipped(store.get(key), 0))
    problems = verify(StoreSource(store), checkpoint).problems
    assert len(problems) == WORLD
    assert all(names.shard_name(rank) in problems[rank] for rank in range(WORLD))


def test_shards_swapped_between_ranks_are_detected(store: Store) -> None:
    checkpoint = write(store)
    one, other = (RunKeys("gpt").shard(checkpoint.attempt, names.shard_name(rank)) for rank in (0, 1))
    first, second = store.get(one), store.get(other)
    store.put(one, second)
    store.put(other, first)
    assert not verify(StoreSource(store), checkpoint).ok
