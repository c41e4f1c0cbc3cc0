from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ckptstore.codecs.chunk_codecs import encode, fast
from ckptstore.commits.catalog import Checkpoint
from ckptstore.format import shards
from ckptstore.format.documents import Content
from ckptstore.reading import restore_check
from ckptstore.reading.fetch import fetch
from ckptstore.reading.restore_check import plan_rank, rank_bytes, rows_of, wants_of
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.verify import Verification, verify
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.base import ObjectInfo, WrappedStore
from tests.support.checkpoints import flipped, sample_arrays, write_checkpoint

_REQUEST_S = 0.2


def _verified(store: Store, checkpoint: Checkpoint, *ranks: int, **options: Any) -> Verification:
    return verify(StoreSource(store), checkpoint, ranks=ranks, **options)


def test_a_healthy_checkpoint_restores_on_1_8_and_512_ranks(store: Store) -> None:
    checkpoint = write_checkpoint(store)
    read: list[int] = []
    found = _verified(store, checkpoint, 512, 8, progress=read.append)
    assert found.ok
    assert [one.ranks for one in found.estimates] == [1, 8, 512]
    assert sum(read) == found.stored_bytes == checkpoint.stored_bytes
    one, eight, many = found.estimates
    assert one.busiest_bytes == one.read_bytes == checkpoint.stored_bytes
    assert one.busiest_bytes > eight.busiest_bytes >= many.busiest_bytes
    assert eight.restore_s is not None
    assert eight.shared_s is not None
    assert 0 < eight.restore_s <= eight.shared_s
    assert verify(StoreSource(store), checkpoint).estimates == (), "not asked for"


class _Slow(WrappedStore):
    """Each listing takes a while, as on a remote store."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        time.sleep(_REQUEST_S)
        return super().list(prefix)


def test_the_estimate_contains_the_requests_before_the_first_byte(store: Store) -> None:
    checkpoint = write_checkpoint(store)
    (estimate,) = _verified(_Slow(store), checkpoint).estimates
    assert estimate.restore_s is not None
    assert estimate.restore_s >= _REQUEST_S, "at least one listing"


def test_a_sample_without_rows_gives_no_estimate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle one of six parts has no row of an entry with two rows, but needs the entries without dimensions."""
    arrays = {"w": np.random.default_rng(0).random((2, 1 << 16), np.float32), "step": np.array(3.0, np.float32)}
    checkpoint = write_checkpoint(store, arrays=arrays)
    monkeypatch.setattr(restore_check, "SAMPLE_BYTES", checkpoint.raw_bytes // 5)
    found = _verified(store, checkpoint, 2)
    assert found.ok
    assert [(one.restore_s, one.shared_s) for one in found.estimates] == [(None, None)] * 2
    assert found.estimates[0].busiest_bytes == checkpoint.stored_bytes, "the plan is known"


def test_the_small_sample_has_every_chunk_and_reads_bytes_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"w{number}": np.random.default_rng(number).random((64, 1024), np.float32) for number in range(20)}
    checkpoint = write_checkpoint(store, arrays=arrays)
    monkeypatch.setattr(restore_check, "SAMPLE_BYTES", checkpoint.raw_bytes // 10)
    throttled: list[int] = []
    assert _verified(store, checkpoint, throttle=throttled.append).ok
    assert 0 < throttled[0] <= checkpoint.raw_bytes // 10, "the sample"
    assert sum(throttled) == checkpoint.stored_bytes


def test_a_flipped_byte_and_a_missing_shard_are_named(store: Store) -> None:
    checkpoint = write_checkpoint(store)
    key = Run(store, "gpt").keys.shard(checkpoint.attempt, "shard-00000.ckpt")
    store.put(key, flipped(store.get(key), 0))
    found = _verified(store, checkpoint, 8)
    assert found.estimates == ()
    assert found.problems == (f"chunk 0 of shard-00000.ckpt of {checkpoint.id} does not match its checksum",)
    store.delete_many([key])
    found = _verified(store, checkpoint)
    assert found.problems
    assert all("shard-00000.ckpt" in problem for problem in found.problems)


def test_undecodable_bytes_fail_although_their_checksum_is_right(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def lying(*args: Any) -> tuple[str, bytes]:
        codec, data = encode(*args)
        return codec, bytes(len(data))

    monkeypatch.setattr(shards, "encode", lying)
    checkpoint = write_checkpoint(store, arrays={"w": np.ones((512, 512), np.float32)}, coding=fast)
    monkeypatch.undo()
    assert "chunk 0" in _verified(store, checkpoint).problems[0]
    assert verify(StoreSource(store), checkpoint).ok, "a plain verification decodes nothing"


def _content(store: Store) -> tuple[Checkpoint, Content]:
    checkpoint = write_checkpoint(store)
    return checkpoint, read_manifest(StoreSource(store), checkpoint).content


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 512])
@pytest.mark.parametrize("size", [1, 7, 8, 700, 1024])
def test_rows_are_cut_as_torch_cuts_them(size: int, ranks: int) -> None:
    parts = [len(part) for part in torch.arange(size).chunk(ranks)]
    parts += [0] * (ranks - len(parts))
    found = [rows_of(size, rank, ranks) for rank in range(ranks)]
    assert [rows for _, rows in found] == parts
    assert [first for first, rows in found if rows] == list(np.cumsum([0, *parts]))[: len([p for p in parts if p])]


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_the_parts_of_all_ranks_are_the_arrays(store: Store, ranks: int) -> None:
    checkpoint, content = _content(store)
    arrays = sample_arrays(0)
    found: dict[str, list[np.ndarray]] = {name: [] for name in arrays}
    for rank in range(ranks):
        buffers = {}
        for want in wants_of(content, rank, ranks):
            array = arrays[want.entry]
            shape = want.box[array.ndim :] if want.box is not None else array.shape
            buffers[want.entry] = np.empty(shape, array.dtype)
        fetch(
            StoreSource(store), checkpoint, plan_rank(content, rank, ranks), {n: _bytes(b) for n, b in buffers.items()}
        )
        for name, part in buffers.items():
            found[name].append(part)
    for name, array in arrays.items():
        if array.ndim == 0:
            assert all(part == array for part in found[name])
            assert len(found[name]) == ranks
        elif array.size:
            assert np.array_equal(np.concatenate(found[name]), array)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def test_one_rank_reads_every_byte_once_and_more_ranks_share_them(store: Store) -> None:
    checkpoint, content = _content(store)
    (alone,), several = rank_bytes(content, 1), rank_bytes(content, 8)
    assert alone == checkpoint.stored_bytes
    assert max(several) < alone
    assert sum(several) >= alone, "a chunk may be read by two ranks"
