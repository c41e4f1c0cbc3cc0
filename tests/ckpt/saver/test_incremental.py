"""What did not change is found, referenced where that is worth it, and never taken for what it is not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt import Checkpointer
from ckpt.saver.incremental import (
    LEAST_SHARE,
    MOST_ATTEMPTS,
    SAMPLE_BYTES,
    Holder,
    KnownChunk,
    compare,
    keys,
    worthwhile,
)
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint, list_checkpoints
from ckptstore.commits.leases import active_leases
from ckptstore.commits.references import marks
from ckptstore.errors import SaverDied
from ckptstore.format.shards import EncodedChunk
from ckptstore.names import Attempt, RunKeys
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.scrubbing import scrub
from ckptstore.run import Run
from ckptstore.stores import open_store
from tests.support.checkpoints import flipped
from tests.support.training import same_state
from tests.support.waiting import present

RUN = "r"
ULID = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


class Adapted(nn.Module):
    """A frozen base, larger than all the rest, and a small part that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(512, 1024).requires_grad_(False)
        self.adapter = nn.Linear(1024, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.adapter(self.base(x))
        return result


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Adapted()
        self.optim = torch.optim.AdamW(self.model.adapter.parameters())
        self.steps = 0

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(4, 512)).square().sum().backward()
        self.optim.step()
        self.steps += 1

    def save(self, checkpointer: Checkpointer, after: int = 1) -> Checkpoint:
        for _ in range(after):
            self.step()
        return checkpointer.save(self.model, self.optim, self.steps)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


@pytest.fixture
def checkpointer(tmp_path: Path) -> Iterator[Checkpointer]:
    with Checkpointer(str(tmp_path), run=RUN, writer="thread", compress="fast") as found:
        yield found


def check_all(folder: Path) -> None:
    store = open_store(str(folder))
    for checkpoint in list_checkpoints(Run(store, RUN)):
        assert verify(StoreSource(store), checkpoint).ok


@pytest.mark.parametrize(("writer", "again"), [("thread", False), ("process", True)])
def test_the_first_save_after_a_rewind_references_what_was_restored(tmp_path: Path, writer: Any, again: bool) -> None:
    """The base changed after the checkpoint to which the run is rewound, so the latest one has none of its chunks."""
    training = Training()
    with ExitStack() as stack:
        options: dict[str, Any] = {"run": RUN, "writer": writer, "compress": "fast"}
        checkpointer = stack.enter_context(Checkpointer(str(tmp_path), **options))
        first = training.save(checkpointer)
        nn.init.normal_(training.model.base.weight)
        assert training.save(checkpointer).referenced_bytes == 0
        if again:
            checkpointer.close()
            checkpointer = stack.enter_context(Checkpointer(str(tmp_path), **options))
        checkpointer.restore(training.model, training.optim, checkpoint=first.step)
        training.steps = first.step
        assert training.save(checkpointer, after=2).referenced_bytes > 0.9 * first.stored_bytes
    assert {mark.attempt for mark in marks(Run(open_store(str(tmp_path)), RUN))} == {first.attempt}
    check_all(tmp_path)


def test_a_frozen_base_is_stored_once(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    states = {}
    saved = []
    for _ in range(4):
        saved.append(training.save(checkpointer))
        states[training.steps] = training.state()
    first, *later = saved
    assert first.referenced_bytes == 0
    assert all(c.referenced_bytes > 0.9 * first.stored_bytes > 20 * c.stored_bytes for c in later)
    for step, state in states.items():
        fresh = Training()
        checkpointer.restore(fresh.model, fresh.optim, checkpoint=step)
        assert same_state(fresh.state(), state)
    checkpointer.close()
    check_all(tmp_path)
    run = Run(open_store(str(tmp_path)), RUN)
    assert ({mark.attempt for mark in marks(run)}, active_leases(run)) == ({first.attempt}, {})


def test_saves_without_a_pause_reference_as_well(tmp_path: Path) -> None:
    training = Training()
    with Checkpointer(str(tmp_path), run=RUN, slots=4) as checkpointer:
        for step in range(4):
            training.step()
            checkpointer.save_async(training.model, training.optim, step)
    stored = [c.stored_bytes for c in list_checkpoints(Run(open_store(str(tmp_path)), RUN))]
    assert max(stored[:3]) * 20 < stored[3]
    check_all(tmp_path)


def test_a_state_that_is_saved_again_stores_nothing(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    for _ in range(3):
        training.save(checkpointer)
    again = [checkpointer.save(training.model, training.optim, step) for step in (10, 11)]
    assert [c.stored_bytes for c in again] == [0, 0]
    check_all(tmp_path)


def test_another_process_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    training = Training()
    for compress in ("fast", "off"):
        with Checkpointer(str(tmp_path), run=RUN, writer="thread", compress=compress) as checkpointer:
            saved = [training.save(checkpointer) for _ in range(2)]
    assert all(c.stored_bytes * 20 < c.referenced_bytes for c in saved)
    check_all(tmp_path)


def test_references_can_be_switched_off(tmp_path: Path) -> None:
    training = Training()
    with Checkpointer(str(tmp_path), run=RUN, writer="thread", max_references=0) as checkpointer:
        assert [training.save(checkpointer).referenced_bytes for _ in range(3)] == [0, 0, 0]
    assert marks(Run(open_store(str(tmp_path)), RUN)) == []


def test_what_thaws_is_stored_and_what_freezes_is_referenced(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    before = training.save(checkpointer)
    with torch.no_grad():
        training.model.base.weight[1, 1] += 1  # one element, in the first part that is sampled
        training.model.base.weight[-1, -1] += 1  # and one that is not
    changed = training.save(checkpointer)
    assert changed.stored_bytes > 0.2 * before.stored_bytes
    state, frozen = training.state(), training.save(checkpointer)
    assert frozen.stored_bytes * 20 < frozen.referenced_bytes
    fresh = Training()
    checkpointer.restore(fresh.model, fresh.optim, checkpoint=changed.step)
    assert same_state(fresh.state(), state)
    check_all(tmp_path)


def test_a_layout_that_changed_is_stored_whole(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training = Training()
    first = training.save(checkpointer)
    training.model.base = nn.Linear(512, 1025).requires_grad_(False)
    training.model.adapter = nn.Linear(1025, 2)
    training.optim = torch.optim.AdamW(training.model.adapter.parameters())
    checkpointer.prepare(training.model, training.optim)
    assert training.save(checkpointer).stored_bytes >= first.stored_bytes
    check_all(tmp_path)


def test_nothing_is_referenced_in_what_is_being_deleted(checkpointer: Checkpointer, tmp_path: Path) -> None:
    training, store = Training(), open_store(str(tmp_path))
    run, first = Run(store, RUN), training.save(checkpointer)
    delete_checkpoint(run, first.attempt, "test", grace_s=3600, force=True)
    second = training.save(checkpointer)
    assert (second.referenced_bytes, second.stored_bytes > 0.9 * first.stored_bytes) == (0, True)
    third = training.save(checkpointer)
    assert {mark.attempt for mark in marks(run)} == {second.attempt}
    assert third.referenced_bytes


@pytest.mark.parametrize("found_in", [0, 1, 2])
def test_nothing_damaged_is_referenced(checkpointer: Checkpointer, tmp_path: Path, found_in: int) -> None:
    """Be it in the checkpoint that holds it, or in one that needs it as well."""
    training, store = Training(), open_store(str(tmp_path))
    saved = [training.save(checkpointer) for _ in range(3)]
    key = RunKeys(RUN).shard(saved[0].attempt, names.shard_name(0))
    (tmp_path / key).write_bytes(flipped(store.get(key), 1000))
    (result,) = scrub(store, [saved[found_in]], "me", system_clock)
    assert not result.ok
    after = training.save(checkpointer)
    assert after.referenced_bytes == 0
    assert verify(StoreSource(store), after).ok
    fresh = Training()
    assert present(checkpointer.restore(fresh.model, fresh.optim)).checkpoint.id == after.id


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_scrub_reads_shared_chunks_once(checkpointer: Checkpointer, tmp_path: Path, newest_first: bool) -> None:
    training, store = Training(), open_store(str(tmp_path))
    saved = [training.save(checkpointer) for _ in range(4)][:: -1 if newest_first else 1]
    checked: list[int] = []
    read: list[int] = []
    assert all(found.ok for found in scrub(store, saved, "me", system_clock, checked.append, read.append))
    assert sum(checked) == sum(c.needed_bytes for c in saved)
    assert sum(read) == sum(c.stored_bytes for c in saved) < 0.5 * sum(checked)
    shard = tmp_path / RunKeys(RUN).shard(min(c.attempt for c in saved), names.shard_name(0))
    shard.write_bytes(bytes(8) + shard.read_bytes()[8:])
    assert [found.ok for found in scrub(store, saved, "me", system_clock)] == [False] * 4, "damage is said of each"


def test_a_saver_that_is_killed_leaves_what_the_next_one_can_use(tmp_path: Path) -> None:
    training = Training()
    with Checkpointer(str(tmp_path), run=RUN) as checkpointer:
        first = training.save(checkpointer)
        training.step()
        checkpointer.save_async(training.model, training.optim, training.steps)
        pid = present(checkpointer.saver_pid)
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):  # the death of the saver, and the save that died with it
            with suppress(SaverDied):
                second = training.save(checkpointer)
        second = training.save(checkpointer)
    assert second.stored_bytes * 20 < second.referenced_bytes
    assert {mark.attempt for mark in marks(Run(open_store(str(tmp_path)), RUN))} == {first.attempt}
    check_all(tmp_path)


# Comparing.


def _known(raw: bytes, sample: bool, digest: bool) -> KnownChunk:
    was = compare(memoryview(raw), None)
    return KnownChunk(
        Attempt(0, ULID), 0, EncodedChunk(b"", len(raw), 1, "raw", ""), was[0] if sample else None,
        was[1] if digest else None,
    )  # fmt: skip


@given(
    size=st.sampled_from([1, SAMPLE_BYTES, SAMPLE_BYTES + 1, 3 * SAMPLE_BYTES]),
    at=st.none() | st.floats(0, 1, exclude_max=True),
    sample=st.booleans(),
    digest=st.booleans(),
)
def test_a_chunk_is_unchanged_only_if_all_of_it_is(size: int, at: float | None, sample: bool, digest: bool) -> None:
    raw = bytes(range(256)) * (size // 256 + 1)
    new = bytearray(raw[:size])
    if at is not None:
        new[int(at * size)] ^= 1
    found, whole, same = compare(memoryview(new), _known(raw[:size], sample, digest))
    assert same == (at is None and digest)
    assert (whole is None) == (sample and at is not None and int(at * size) < SAMPLE_BYTES), "no more than is needed"
    assert found == compare(memoryview(new), None)[0]


@given(
    st.dictionaries(
        st.builds(Attempt, st.integers(0, 99), st.just(ULID)), st.tuples(st.integers(1, 100), st.integers(0, 3000))
    ),
    st.integers(1, 5000),
)
def test_what_stays_for_references_is_worth_it(found: dict[Attempt, tuple[int, int]], total: int) -> None:
    used = {name: count for name, (count, _) in found.items()}
    sizes = {name: count + rest for name, (count, rest) in found.items()}
    chosen = worthwhile(used, {name: Holder(size) for name, size in sizes.items()}, total)
    assert len(chosen) <= MOST_ATTEMPTS
    assert sum(sizes[name] - used[name] for name in chosen) <= total
    assert all(used[name] * LEAST_SHARE >= sizes[name] for name in chosen)


def test_a_small_part_does_not_keep_a_large_checkpoint(checkpointer: Checkpointer) -> None:
    model = nn.ParameterDict({"frozen": torch.zeros(20_000), "trained": torch.zeros(1_000_000)})
    saved = []
    for step in range(3):
        model["trained"].data.add_(torch.randn(1_000_000))
        saved.append(checkpointer.save(model, None, step))
    assert [c.referenced_bytes for c in saved] == [0, 0, 0]


def test_chunks_are_found_again_where_their_slice_begins() -> None:
    box = (0, 10)
    slices = [("a", box, 0), ("b", box, 100), ("c", box, 250)]
    found = list(keys(slices, [(0, 60), (60, 40), (100, 200), (300, 5)]))
    assert found == [("a", box, 0, 60), ("a", box, 60, 40), ("b", box, 0, 200), ("c", box, 50, 5)]


def test_hashing_is_all_a_changing_state_costs(checkpointer: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the store, and nearly nothing is hashed."""
    hashed: list[int] = []
    real = xxhash.xxh3_128_digest

    def digest(raw: memoryview) -> bytes:
        hashed.append(len(raw))
        return real(raw)

    monkeypatch.setattr(xxhash, "xxh3_128_digest", digest)
    model = nn.ParameterDict({"w": torch.from_numpy(np.random.default_rng(0).standard_normal(4_000_000, np.float32))})
    checkpointer.save(model, None, 0)
    hashed.clear()
    model["w"].data.add_(1)
    checkpointer.save(model, None, 1)
    assert sum(hashed) < 0.1 * 16_000_000
