from __future__ import annotations

from math import prod
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ckpt.capture.parts import FlatRange, _mesh_cut, part_of
from ckptstore.errors import UnsupportedObject
from ckptstore.format import boxes
from tests.ckpt.capture.meshes import Mesh, coordinates, held, placements
from tests.support.layouts import region

Case = tuple[list[int], tuple[Placement, ...], list[int]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A mesh, placements on it, and a shape."""
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return mesh, draw(placements(mesh, len(shape))), shape


@given(cases())
def test_a_part_is_what_torch_chunk_gives(case: Case) -> None:
    """Each copy on a mesh holds every element once."""
    mesh, given_placements, shape = case
    ranks = torch.arange(prod(mesh)).reshape(mesh)
    whole = torch.arange(prod(shape)).reshape(shape)
    copies = prod(n for n, placement in zip(mesh, given_placements, strict=True) if isinstance(placement, Replicate))
    seen = torch.zeros([copies, *shape], dtype=torch.int64)
    for coordinate in coordinates(mesh):
        local = whole
        for dimension, size in enumerate(shape):
            local = local.index_select(dimension, held(size, dimension, mesh, given_placements, coordinate))
        cut = _mesh_cut(cast(Any, Mesh(ranks, coordinate)), given_placements, tuple(shape))
        assert (cut.local, cut.ranks, len(cut.holders)) == (tuple(local.shape), tuple(range(prod(mesh))), copies)
        placed = torch.full_like(local, -1)
        for box, at in zip(cut.boxes, cut.at, strict=True):
            here = tuple(slice(start, start + size) for start, size in zip(at, boxes.sizes(box), strict=True))
            placed[here] = whole[region(box)]
            seen[cut.holders.index(int(ranks[coordinate]))][region(box)] += 1
        assert torch.equal(placed, local)
        assert sum(prod(boxes.sizes(box)) for box in cut.boxes) == local.numel()
    assert bool((seen == 1).all())


def test_fully_shard_after_tensor_parallel_on_uneven_sizes() -> None:
    """torch's own offsets are wrong here: 7 rows, cut in two and each half in three."""
    found = [
        _mesh_cut(
            cast(Any, Mesh(torch.arange(6).reshape(3, 2), coordinate)),
            (_StridedShard(0, split_factor=2), Shard(0)),
            (7,),
        ).boxes
        for coordinate in coordinates([3, 2])
    ]
    assert found == [((0, 2),), ((4, 1),), ((2, 2),), ((5, 1),), (), ((6, 1),)]


def test_a_process_outside_the_mesh_holds_nothing() -> None:
    cut = _mesh_cut(cast(Any, Mesh(torch.arange(2), None)), (Shard(0),), (4, 4))
    assert (cut.boxes, cut.local) == ((), (0, 0))


def test_pending_sums_are_refused() -> None:
    with pytest.raises(UnsupportedObject, match="a sum over the mesh is still to be made"):
        _mesh_cut(cast(Any, Mesh(torch.arange(2), (0,))), (Partial(),), (4,))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.floats(0, 1), st.floats(0, 1))
def test_a_range_of_a_flat_parameter_is_boxes_that_view_it(shape: list[int], first: float, second: float) -> None:
    start, stop = sorted((round(first * prod(shape)), round(second * prod(shape))))
    whole = torch.arange(prod(shape))
    local = whole[start:stop].clone()
    part = FlatRange(tuple(shape), start, stop, (0, 1)).part(local)
    assert part is not None
    assert (part.shape, part.ranks, part.cells) == (tuple(shape), (0, 1), ((0,), (1,)))
    seen = torch.full(shape, -1)
    for piece in part.pieces:
        seen[region(piece.box)] = piece.tensor
        piece.tensor.neg_()  # reaches the live memory
    assert torch.equal(seen.flatten()[start:stop], whole[start:stop])
    assert int((seen == -1).sum()) == prod(shape) - (stop - start)
    assert torch.equal(local, -whole[start:stop])


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_a_plain_tensor_is_whole(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    part = part_of("p", tensor)
    assert (part.boxes, part.ranks) == ((boxes.whole(shape),), None)
    assert part.pieces[0].tensor.data_ptr() == tensor.data_ptr()
