"""A layout's checkpoint restores in other layouts: all bits of the whole state, and the losses go on.

By default each of the core layouts is restored in itself and in the next one, and each of the further ones in another
one and from another one. CKPTD_LAYOUTS=all restores each core layout in each, and each further one also in itself.
"""

from __future__ import annotations

import os
from itertools import product
from math import prod

import pytest

from ckptstore.format import boxes
from ckptstore.format.boxes import Box
from ckptstore.format.documents import Content
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.support.layouts import box_of
from tests.support.parallel.built import Setup
from tests.support.parallel.matrix import Grid, Matrix, check_restored, run_matrices
from tests.support.parallel.model import Shape

pytestmark = pytest.mark.slow

CORE = ("single", "ddp", "fsdp2", "fsdp2_4", "hsdp", "tp", "tp_fsdp2", "pp")
FURTHER = {
    "fsdp1": "tp", "fsdp1_grad": "fsdp2_4", "fsdp1_flat": "fsdp1", "zero": "fsdp2", "zero_by_hand": "zero",
    "ddp_tp": "hsdp", "pp_interleaved": "tp_fsdp2", "model_parallel": "pp", "fsdp2_checkpointed": "ddp",
}  # fmt: skip

ALL = os.environ.get("CKPTD_LAYOUTS") == "all"
Pairs = list[tuple[str, str]]


def _with_each(name: str, *others: str) -> Pairs:
    """To the last of the others and from the first of them; with ALL to each of them and to itself."""
    every = [(name, name), *((name, other) for other in others), (others[0], name)]
    return every if ALL else every[-2:]


def _core() -> Pairs:
    near = {(one, (*CORE, *CORE)[at + ahead]) for at, one in enumerate(CORE) for ahead in (0, 1)}
    return [pair for pair in product(CORE, CORE) if ALL or pair in near]


GRIDS = {
    "core": Grid(_core()),
    "further": Grid([pair for name, other in FURTHER.items() for pair in _with_each(name, "single", other)]),
    "tied": Grid(
        [
            *_with_each("pp", "single", "fsdp2"), *_with_each("pp_interleaved", "model_parallel", "tp"),
            *_with_each("fsdp1", "pp"), *_with_each("fsdp1_flat", "fsdp2"), *_with_each("tp_fsdp2", "pp_interleaved"),
        ],
        Setup(shape=Shape(tied=True)),
    ),
    "two_optimizers": Grid(
        [*_with_each("fsdp2", "single", "pp"), *_with_each("tp", "zero"), *_with_each("hsdp", "pp_interleaved")],
        Setup(two_optimizers=True),
    ),
    "experts": Grid([*_with_each("ep", "single", "fsdp2"), ("ddp", "ep")], Setup(shape=Shape(experts=3))),
}  # fmt: skip


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Matrix]:
    return run_matrices(GRIDS, tmp_path_factory.mktemp("grids"))


@pytest.mark.parametrize(
    ("grid", "saved", "restored"),
    [(name, *pair) for name, grid in GRIDS.items() for pair in grid.pairs],
    ids=lambda value: str(value),
)
def test_restored_in_another_layout(grids: dict[str, Matrix], grid: str, saved: str, restored: str) -> None:
    check_restored(grids[grid], saved, restored)


def test_core_layouts_have_the_odd_shapes(grids: dict[str, Matrix]) -> None:
    """Shapes that no world size divides, that are smaller than it, empty shards and scalars: they do occur."""
    of_entry = _slices(_content(grids["core"], "fsdp2_4"))
    assert [boxes.sizes(box)[0] for _, box in of_entry["model/head.weight"]] == [9, 9, 9, 6]
    # Rank 3 of 4 has nothing of a tensor of three elements, and ranks 1 to 3 nothing of one row.
    assert [(shard, box) for shard, box in of_entry["model/blocks.0.mix"]] == [(i, (i, 1)) for i in range(3)]
    assert of_entry["optim/state/blocks.0.shift/exp_avg"] == [(0, (0, 0, 1, 10))]
    assert of_entry["model/scale"] == of_entry["model/blocks.0.calls"] == [(0, ())]


def test_strided_shards_are_uneven(grids: dict[str, Matrix]) -> None:
    # 27 rows: the tensor-parallel ranks have 14 and 13 of them, and each pair shares its own.
    slices = _slices(_content(grids["core"], "tp_fsdp2"))["model/blocks.0.mlp.up.weight"]
    assert [(box[0], box[2]) for _, box in slices] == [(0, 7), (14, 7), (7, 7), (21, 6)]


@pytest.mark.parametrize("layout", CORE)
def test_each_element_is_stored_once(grids: dict[str, Matrix], layout: str) -> None:
    content = _content(grids["core"], layout)
    for name, slices in _slices(content).items():
        shape = content.entries.shape[content.entries.name.index(name)]
        assert sum(prod(boxes.sizes(box)) for _, box in slices) == prod(shape), name


def test_data_parallel_ranks_write_one_shard(grids: dict[str, Matrix]) -> None:
    assert [shard.rank for shard in _content(grids["core"], "ddp").shards] == [0]
    assert [shard.rank for shard in _content(grids["core"], "hsdp").shards] == [0, 1]


def test_tied_weights_of_one_process_are_stored_once(grids: dict[str, Matrix]) -> None:
    assert _content(grids["tied"], "single").aliases == {"model/head.weight": "model/tok.weight"}
    # Across pipeline stages they are copies, and each stage writes its own.
    of_entry = _slices(_content(grids["tied"], "pp"))
    assert of_entry["model/tok.weight"][0][0] != of_entry["model/head.weight"][0][0]


def test_experts_are_written_by_those_that_have_them(grids: dict[str, Matrix]) -> None:
    of_entry = _slices(_content(grids["experts"], "ep"))
    writers = [of_entry[f"model/blocks.0.mlp.experts.{number}.up.weight"][0][0] for number in range(3)]
    assert writers == [0, 1, 0]


def _content(matrix: Matrix, layout: str) -> Content:
    source = StoreSource(open_store(str(matrix.folder / layout / "store")))
    return read_manifest(source, source.latest("matrix")).content


def _slices(content: Content) -> dict[str, list[tuple[int, Box]]]:
    """Rank that wrote it, and box, of each slice, by entry."""
    found: dict[str, list[tuple[int, Box]]] = {name: [] for name in content.entries.name}
    for row, entry in enumerate(content.slices.entry.tolist()):
        rank = content.shards[int(content.slices.shard[row])].rank
        found[content.entries.name[entry]].append((rank, box_of(content, row)))
    return {name: sorted(slices) for name, slices in found.items()}
