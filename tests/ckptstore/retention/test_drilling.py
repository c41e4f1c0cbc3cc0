from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ckptstore.codecs.chunk_codecs import Buffer, encode, fast
from ckptstore.commits.catalog import Checkpoint, State, latest, list_checkpoints
from ckptstore.format import shards
from ckptstore.reading.verify import VerifiedChunks
from ckptstore.retention import drilling
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.retention.drilling import drill, due_for_drill, last_drill
from ckptstore.retention.scrubbing import due_for_scrub, verified_at
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.base import ObjectInfo, WrappedStore
from tests.support.checkpoints import sample_arrays, write_checkpoint

_DAY_S = 24 * 3600.0
_REQUEST_S = 0.2


def _flip(store: Store, checkpoint: Checkpoint, at: int = 0) -> None:
    key = Run(store, checkpoint.run).keys.shard(checkpoint.attempt, "shard-00000.ckpt")
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, bytes(data))


def test_a_healthy_run_restores_on_1_8_and_512_ranks(store: Store) -> None:
    run = Run(store, "gpt")
    checkpoint = write_checkpoint(store)
    read: list[int] = []
    found = drill(run, checkpoint, [512, 8], progress=read.append)
    assert found is not None
    assert found.problems == []
    assert [one.ranks for one in found.layouts] == [1, 8, 512]
    assert sum(read) == found.stored_bytes == checkpoint.stored_bytes
    one, eight, many = found.layouts
    assert one.busiest_bytes == one.read_bytes == checkpoint.stored_bytes
    assert one.busiest_bytes > eight.busiest_bytes >= many.busiest_bytes
    assert eight.restore_s is not None
    assert eight.shared_s is not None
    assert 0 < eight.restore_s <= eight.shared_s
    assert found.bytes_per_s > 0
    assert last_drill(run) == found
    assert set(verified_at(run)) == {checkpoint.attempt}
    assert due_for_scrub([run], run.clock() - _DAY_S) == [], "the same read serves the scrub"


class _Slow(WrappedStore):
    """Each listing and each write of a small object takes a while, as on a remote store."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        time.sleep(_REQUEST_S)
        return super().list(prefix)

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        time.sleep(_REQUEST_S)
        return super().put_if_absent(key, data)


def test_the_estimate_contains_the_requests_before_the_first_byte(store: Store) -> None:
    checkpoint = write_checkpoint(store)
    found = drill(Run(_Slow(store), "gpt"), checkpoint)
    assert found is not None
    (layout,) = found.layouts
    assert layout.restore_s is not None
    assert layout.restore_s >= 2 * _REQUEST_S, "at least one listing, and the lease"


def test_a_sample_without_rows_gives_no_estimate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle one of six parts has no row of an entry with two rows, but needs the entries without dimensions."""
    arrays = {"w": np.random.default_rng(0).random((2, 1 << 16), np.float32), "step": np.array(3.0, np.float32)}
    checkpoint = write_checkpoint(store, arrays=arrays)
    monkeypatch.setattr(drilling, "SAMPLE_BYTES", checkpoint.raw_bytes // 5)
    found = drill(Run(store, "gpt"), checkpoint, [2])
    assert found is not None
    assert found.problems == []
    assert [(one.restore_s, one.shared_s) for one in found.layouts] == [(None, None)] * 2
    assert found.layouts[0].busiest_bytes == checkpoint.stored_bytes, "the plan is known"
    assert last_drill(Run(store, "gpt")) == found


def test_every_byte_is_read_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the checkpoint is beyond the sample that is restored at full speed."""
    checkpoint = write_checkpoint(store)
    monkeypatch.setattr(drilling, "SAMPLE_BYTES", checkpoint.raw_bytes // 3)
    throttled: list[int] = []
    found = drill(Run(store, "gpt"), checkpoint, throttle=throttled.append)
    assert found is not None
    assert found.problems == []
    assert sum(throttled) >= checkpoint.stored_bytes
    known = VerifiedChunks()
    assert drill(Run(store, "gpt"), checkpoint, checked=known) is not None


def test_the_sample_is_small_although_it_needs_a_row_of_every_chunk(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"w{number}": np.random.default_rng(number).random((64, 1024), np.float32) for number in range(20)}
    checkpoint = write_checkpoint(store, arrays=arrays)
    monkeypatch.setattr(drilling, "SAMPLE_BYTES", checkpoint.raw_bytes // 10)
    throttled: list[int] = []
    found = drill(Run(store, "gpt"), checkpoint, throttle=throttled.append)
    assert found is not None
    assert found.problems == []
    assert 0 < throttled[0] <= checkpoint.raw_bytes // 10, "the sample"
    assert sum(throttled) == checkpoint.stored_bytes


def test_a_flipped_byte_fails_the_drill_and_is_named(store: Store) -> None:
    run = Run(store, "gpt")
    write_checkpoint(store, step=1)
    checkpoint = write_checkpoint(store, step=2)
    _flip(store, checkpoint)
    found = drill(run, checkpoint, [8])
    assert found is not None
    assert found.layouts == []
    assert found.problems == [f"chunk 0 of shard-00000.ckpt of {checkpoint.id} does not match its checksum"]
    assert {c.step: c.state for c in list_checkpoints(run)} == {1: State.COMMITTED, 2: State.CORRUPT}
    assert latest(run).step == 1
    due, last = due_for_drill(run, _DAY_S, 30 * _DAY_S)
    assert due is not None, "the one before it is drilled next"
    assert due.step == 1
    assert last == found


def test_a_checkpoint_without_a_shard_fails(store: Store) -> None:
    run = Run(store, "gpt")
    checkpoint = write_checkpoint(store)
    store.delete_many([run.keys.shard(checkpoint.attempt, "shard-00000.ckpt")])
    found = drill(run, checkpoint)
    assert found is not None
    assert found.problems
    assert all("shard-00000.ckpt" in problem for problem in found.problems)
    assert list_checkpoints(run)[0].state is State.CORRUPT


def test_bytes_that_cannot_be_decoded_fail_although_their_checksum_is_right(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(*args: Any) -> tuple[str, bytes]:
        codec, data = encode(*args)
        return codec, bytes(len(data))

    monkeypatch.setattr(shards, "encode", lying)
    checkpoint = write_checkpoint(store, arrays={"w": np.ones((512, 512), np.float32)}, coding=fast)
    monkeypatch.undo()
    found = drill(Run(store, "gpt"), checkpoint)
    assert found is not None
    assert found.problems
    assert "chunk 0" in found.problems[0]


def test_only_the_last_drill_is_kept_and_it_goes_with_its_checkpoint(store: Store) -> None:
    run = Run(store, "gpt")
    first, second = (write_checkpoint(store, step=step) for step in (1, 2))
    drill(run, first)
    drill(run, second)
    assert [info.key for info in store.list(run.keys.drills)] == [run.keys.drill(second.attempt)]
    delete_checkpoint(run, second.attempt, "test", force=True)
    assert list(store.list(run.keys.drills)) == []
    assert last_drill(run) is None
    assert drill(run, second) is None, "it is being deleted"


def test_a_run_that_stands_still_is_drilled_as_often_as_it_is_scrubbed(store: Store) -> None:
    now = [1_700_000_000.0]
    run = Run(store, "gpt", clock=lambda: now[0])
    assert due_for_drill(run, _DAY_S, 30 * _DAY_S) == (None, None)
    write_checkpoint(store, step=1, arrays=sample_arrays(1), clock=run.clock)
    drill(run, latest(run))
    now[0] += 2 * _DAY_S
    assert due_for_drill(run, _DAY_S, 30 * _DAY_S)[0] is None
    write_checkpoint(store, step=2, clock=run.clock)
    due, _ = due_for_drill(run, _DAY_S, 30 * _DAY_S)
    assert due is not None
    assert due.step == 2
    drill(run, due)
    write_checkpoint(store, step=3, clock=run.clock)
    now[0] += _DAY_S / 2
    assert due_for_drill(run, _DAY_S, 30 * _DAY_S)[0] is None, "not before a day has passed"
    now[0] += 365 * _DAY_S
    drill(run, latest(run))
    now[0] -= 365 * _DAY_S
    assert due_for_drill(run, _DAY_S, 30 * _DAY_S)[0] is not None, "the clock of the last one was a year ahead"
