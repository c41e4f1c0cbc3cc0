import numpy as np
import pytest
import torch

from ckptstore.commits.catalog import Checkpoint
from ckptstore.format.documents import Content
from ckptstore.format.layouts import plan_layout, plan_rank, rows_of, wants_of
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import Store
from tests.support.checkpoints import sample_arrays, write_checkpoint


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
    alone, several = plan_layout(content, 1), plan_layout(content, 8)
    assert alone.busiest_bytes == alone.read_bytes == checkpoint.stored_bytes
    assert several.busiest_bytes < alone.busiest_bytes
    assert several.read_bytes >= alone.read_bytes, "a chunk may be read by two ranks"
