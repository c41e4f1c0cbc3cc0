"""Meshes without processes, and what torch.chunk gives each of their coordinates: a referee for parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

Coordinate = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Mesh:
    """What parts ask of a DeviceMesh, seen from one coordinate."""

    mesh: torch.Tensor
    coordinate: Coordinate | None

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def get_coordinate(self) -> Coordinate | None:
        return self.coordinate

    def size(self, dimension: int) -> int:
        return self.mesh.shape[dimension]


def coordinates(sizes: Sequence[int]) -> list[Coordinate]:
    return list(product(*map(range, sizes)))


@st.composite
def placements(draw: st.DrawFn, mesh: Sequence[int], dimensions: int) -> tuple[Placement, ...]:
    """Any on a mesh: some shards after others to their right, as fully_shard makes them, or interleaved."""
    found: list[Placement] = []
    right = [1] * dimensions
    for size in reversed(mesh):
        dimension = draw(st.integers(-1, dimensions - 1))
        if dimension < 0:
            found.insert(0, Replicate())
            continue
        strided = draw(st.sampled_from(["no", "after", "interleaved"]))
        factor = right[dimension] if strided == "after" else draw(st.integers(2, 3))
        plain = strided == "no" or (strided == "after" and factor == 1)
        # An interleaved cut that says the same as one that comes after others is one.
        plain = plain or (strided == "interleaved" and (factor == right[dimension] or right[dimension] > 1))
        found.insert(0, Shard(dimension) if plain else _StridedShard(dimension, split_factor=factor))
        right[dimension] *= size
    return tuple(found)


def held(
    size: int, dimension: int, mesh: Sequence[int], given: Sequence[Placement], coordinate: Coordinate
) -> torch.Tensor:
    """The indices of one dimension that a coordinate holds, in the order in which they lie there."""
    mine = [
        (placement, count, own)
        for placement, count, own in zip(given, mesh, coordinate, strict=True)
        if not isinstance(placement, Replicate) and placement.dim == dimension  # type: ignore[attr-defined]
    ]
    first: list[tuple[int, int, int]] = []
    last: list[tuple[int, int, int]] = []
    right = 1
    for placement, count, own in reversed(mine):
        if isinstance(placement, _StridedShard) and placement.split_factor == right > 1:
            last.append((1, count, own))
        else:
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            first.insert(0, (factor, count, own))
        right *= count
    indices = torch.arange(size)
    for factor, count, own in [*first, *last]:
        parts = [_chunk(part, count, own) for part in torch.chunk(indices, factor)]
        indices = torch.cat(parts)
    return indices


def _chunk(indices: torch.Tensor, count: int, own: int) -> torch.Tensor:
    chunks = torch.chunk(indices, count)
    return chunks[own] if own < len(chunks) else indices[:0]
