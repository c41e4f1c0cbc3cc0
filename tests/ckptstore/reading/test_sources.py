"""A chunk that a nearer source lacks, or holds damaged, is read from the next one; the result is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptstore.codecs.chunk_codecs import CodingPolicy, fast, off
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CorruptObject
from ckptstore.format.planning import ShardRead, entry_bytes, plan_reads
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.reading.sources import StoredChunks, fetch_from
from ckptstore.stores import open_store
from tests.support.checkpoints import sample_arrays, whole_entries, write_checkpoint

ARRAYS = {**sample_arrays(), "model/large": np.arange(5_000_000, dtype=np.float32)}


@pytest.fixture(params=[off, fast])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    """A checkpoint in the folders far and near, object for object."""
    coding: CodingPolicy = request.param
    checkpoint = write_checkpoint(open_store(str(tmp_path / "far")), arrays=ARRAYS, coding=coding)
    shutil.copytree(tmp_path / "far", tmp_path / "near")
    return checkpoint


def restore(tmp_path: Path, checkpoint: Checkpoint) -> tuple[list[ShardRead], dict[str, int]]:
    """What is left after the near store, and the bytes read there; checks that all bytes are right in the end."""
    far, near = (StoreSource(open_store(str(tmp_path / name))) for name in ("far", "near"))
    content = read_manifest(far, checkpoint).content
    buffers = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    reads = plan_reads(content, whole_entries(content.entries.name))
    done: list[int] = []
    left, found = fetch_from([StoredChunks("near", near, checkpoint)], reads, buffers, done.append)
    fetch(far, checkpoint, left, buffers, done.append)
    assert {name: bytes(buffer) for name, buffer in buffers.items()} == {n: a.tobytes() for n, a in ARRAYS.items()}
    assert sum(done) == sum(chunk.raw for read in reads for chunk in read.chunks)  # each chunk counts once
    return left, found


def shard_of(tmp_path: Path, tier: str) -> Path:
    [found] = (tmp_path / tier).rglob("shard-00000.ckpt")
    return found


def test_all_chunks_come_from_the_nearest(tmp_path: Path, written: Checkpoint) -> None:
    shard_of(tmp_path, "far").unlink()
    left, found = restore(tmp_path, written)
    assert left == []
    assert found == {"near": sum(array.nbytes for array in ARRAYS.values())}


def test_a_damaged_chunk_is_read_from_the_next(
    tmp_path: Path, written: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    shard = shard_of(tmp_path, "near")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    left, found = restore(tmp_path, written)
    assert sum(len(read.chunks) for read in left) == 1
    assert found["near"] == sum(array.nbytes for array in ARRAYS.values()) - left[0].chunks[0].raw
    assert "read from elsewhere" in caplog.text
    buffers = {name: memoryview(bytearray(array.nbytes)) for name, array in ARRAYS.items()}
    with pytest.raises(CorruptObject):  # without another source it is an error
        fetch(StoreSource(open_store(str(tmp_path / "near"))), written, left, buffers)


def test_a_truncated_or_missing_shard_is_read_from_the_next(tmp_path: Path, written: Checkpoint) -> None:
    shard = shard_of(tmp_path, "near")
    shard.write_bytes(shard.read_bytes()[:-1])
    left, _ = restore(tmp_path, written)
    assert sum(len(read.chunks) for read in left) == 1
    shard.unlink()
    _, found = restore(tmp_path, written)
    assert found == {"near": 0}


def test_a_store_that_is_away_is_not_asked_again(tmp_path: Path, written: Checkpoint) -> None:
    source = StoreSource(open_store(str(tmp_path / "near")))
    shutil.rmtree(tmp_path / "near")  # as an unmounted volume
    content = read_manifest(StoreSource(open_store(str(tmp_path / "far"))), written).content
    reads = plan_reads(content, whole_entries(content.entries.name))
    buffers = {name: memoryview(bytearray(size)) for name, size in entry_bytes(content).items()}
    left = StoredChunks("near", source, written).fetch(reads, buffers, lambda _: None)
    assert sum(chunk.raw for read in left for chunk in read.chunks) == sum(a.nbytes for a in ARRAYS.values())
