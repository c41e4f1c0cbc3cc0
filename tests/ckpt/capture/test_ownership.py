"""Ownership: in any world, each element of each tensor has exactly one writer, and ranks that disagree are named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ckpt.capture.ownership import DIFFERS, Ownership, Unit, agree
from ckpt.capture.parts import FlatRange, TensorPart, TensorPiece, _mesh_cut, check_within, part_of
from ckptstore.errors import LayoutChanged, UnsupportedObject
from tests.ckpt.capture.meshes import Mesh, placements
from tests.support.layouts import region

Rank = int
Parts = dict[Rank, TensorPart]
"""What each rank holds of one tensor; ranks that hold nothing are absent."""
AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class World:
    """Ranks in a pipeline, data and tensor parallel grid, and what they hold."""

    ranks: torch.Tensor
    tensors: dict[str, Parts]

    @property
    def size(self) -> int:
        return self.ranks.numel()

    def agree(self, split_replicas: bool, members: tuple[int, ...] | None = None) -> list[Ownership]:
        """As each rank of a group sees it."""
        said = [
            {name: unit_of(parts[rank]) for name, parts in self.tensors.items() if rank in parts}
            for rank in members or range(self.size)
        ]
        return [agree(rank, said, split_replicas, members) for rank in range(len(said))]


def unit_of(part: TensorPart, sample: str = "same", buffer: bool = False) -> Unit:
    return Unit(str(part.dtype), part.shape, part.boxes, part.ranks is not None, 4 * prod(part.shape), sample, buffer)


def whole(shape: tuple[int, ...]) -> TensorPart:
    return part_of("p", torch.zeros(shape))


def on_mesh(mesh: torch.Tensor, coordinate: tuple[int, ...], given: tuple[Placement, ...], shape: Any) -> TensorPart:
    cut = _mesh_cut(cast(Any, Mesh(mesh, coordinate)), given, tuple(shape))
    pieces = tuple(TensorPiece(box, torch.empty(0)) for box in cut.boxes)
    return TensorPart(tuple(shape), torch.float32, pieces, cut.ranks, cut.cells, cut.holders)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """Replicas, meshes of one, two or three dimensions and plain tensors beside them, stages, experts, FSDP1."""
    sizes = [draw(st.integers(1, 3)) for _ in AXES]
    order = draw(st.permutations(range(prod(sizes))))
    ranks = torch.tensor(order).reshape(sizes)
    tensors = {}
    for number in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
        kind = draw(
            st.sampled_from(["everyone", "stage", "tied stages", "expert", "mesh", "dp mesh", "tp mesh", "flat"])
        )
        tensors[f"model/{number}-{kind}"] = draw(KINDS[kind](ranks, shape))
    return World(ranks, {name: parts for name, parts in tensors.items() if parts})


Kind = Callable[[torch.Tensor, tuple[int, ...]], st.SearchStrategy[Parts]]


def _plain(choose: Callable[[torch.Tensor, int], torch.Tensor]) -> Kind:
    def kind(ranks: torch.Tensor, shape: tuple[int, ...]) -> st.SearchStrategy[Parts]:
        stages = st.integers(0, ranks.shape[0] - 1)
        return stages.map(lambda stage: {rank: whole(shape) for rank in choose(ranks, stage).flatten().tolist()})

    return kind


def _meshes(*axes: int) -> Kind:
    """The mesh of these axes in one stage; other axes have meshes of their own, with equal tensors."""

    @st.composite
    def kind(draw: st.DrawFn, ranks: torch.Tensor, shape: tuple[int, ...]) -> Parts:
        stage = ranks[draw(st.integers(0, ranks.shape[0] - 1))]
        given = draw(placements([stage.shape[axis] for axis in axes], len(shape)))
        parts = {}
        for coordinate in product(*map(range, stage.shape)):
            mesh = stage[tuple(slice(None) if axis in axes else at for axis, at in enumerate(coordinate))]
            part = on_mesh(mesh, tuple(coordinate[axis] for axis in axes), given, shape)
            if part.pieces:
                parts[int(stage[coordinate])] = part
        return parts

    return kind


@st.composite
def _flat(draw: st.DrawFn, ranks: torch.Tensor, shape: tuple[int, ...]) -> Parts:
    """FSDP1 over the data parallel ranks of a stage; of each tensor parallel coordinate one group."""
    stage = ranks[draw(st.integers(0, ranks.shape[0] - 1))]
    cuts = sorted(draw(st.lists(st.integers(0, prod(shape)), min_size=len(stage) - 1, max_size=len(stage) - 1)))
    parts = {}
    for group in stage.T:
        for rank, start, stop in zip(group.tolist(), [0, *cuts], [*cuts, prod(shape)], strict=True):
            if start < stop:
                part = FlatRange(shape, start, stop, tuple(group.tolist())).part(torch.zeros(stop - start))
                assert part is not None
                parts[rank] = part
    return parts


KINDS: dict[str, Kind] = {
    "everyone": _plain(lambda ranks, _: ranks),
    "stage": _plain(lambda ranks, stage: ranks[stage]),
    "tied stages": _plain(lambda ranks, _: torch.cat([ranks[0], ranks[-1]])),
    "expert": _plain(lambda ranks, stage: ranks[stage, 0, 0]),
    "mesh": _meshes(0, 1),
    "dp mesh": _meshes(0),
    "tp mesh": _meshes(1),
    "flat": _flat,
}


@given(st.data(), worlds(), st.booleans())
def test_each_element_has_one_writer(data: st.DataObject, world: World, split_replicas: bool) -> None:
    """In the world, or in a group that holds all of it."""
    group = st.sets(st.integers(0, world.size - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    chosen = data.draw(st.none() | group)
    members = chosen or tuple(range(world.size))
    ownerships = dict(zip(members, world.agree(split_replicas, chosen), strict=True))
    for name, parts in world.tensors.items():
        held = {rank: part for rank, part in parts.items() if rank in members}
        cells = [cell for part in held.values() for cell in part.cells]
        if any(set(members).isdisjoint(cell) for cell in cells):
            with pytest.raises(UnsupportedObject, match="no rank of the group"):
                check_within(name, cells, set(members))
            continue
        check_within(name, cells, set(members))
        seen = torch.zeros(next(iter(parts.values())).shape, dtype=torch.int64)
        for rank, part in held.items():
            if ownerships[rank].writes(name, part.ranks, part.holders):
                for box in part.boxes:
                    seen[region(box)] += 1
        assert bool((seen == (1 if held else 0)).all()), name


@given(worlds(), st.booleans())
def test_a_scalar_beside_a_tensor_has_one_writer_and_each_unit_one_speaker(world: World, split_replicas: bool) -> None:
    """An optimizer's step is a plain tensor on every rank that holds some of the parameter."""
    ownerships = world.agree(split_replicas)
    for name, parts in world.tensors.items():
        assert [ownerships[rank].writes(name, None, ()) for rank in parts].count(True) == 1
        assert [rank for rank in parts if ownerships[rank].owns(name)] == [min(parts)]


@given(worlds())
def test_without_spread_the_lowest_rank_writes_what_all_have(world: World) -> None:
    ownerships = world.agree(split_replicas=False)
    for name, parts in world.tensors.items():
        if all(part.ranks is None for part in parts.values()):
            assert [
                rank for rank, part in parts.items() if ownerships[rank].writes(name, part.ranks, part.holders)
            ] == [min(parts)]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_spread_gives_each_replica_about_as_many_bytes(sizes: list[int], replicas: int) -> None:
    tensors = {f"model/{i}": dict.fromkeys(range(replicas), whole((size,))) for i, size in enumerate(sizes)}
    world = World(torch.arange(replicas), tensors)
    load = Counter(dict.fromkeys(range(replicas), 0))
    for rank, ownership in enumerate(world.agree(split_replicas=True)):
        load[rank] = sum(
            4 * s
            for (name, parts), s in zip(tensors.items(), sizes, strict=True)
            if ownership.writes(name, parts[rank].ranks, parts[rank].holders)
        )
    assert max(load.values()) - min(load.values()) <= 4 * max(sizes)


@pytest.mark.parametrize("split_replicas", [False, True])
def test_optimizer_state_belongs_to_ranks_whose_optimizer_has_it(split_replicas: bool) -> None:
    unit = unit_of(whole((3,)))
    with_state = replace(unit, optimizers=("optim",))
    said = [{"m/a": unit, "m/b": with_state}, {"m/a": with_state, "m/b": with_state}, {"m/a": with_state}]
    ownerships = [agree(rank, said, split_replicas) for rank in range(3)]
    own = ownerships[0].state_unit("m/a", "optim")
    assert [ownership.owns(own) for ownership in ownerships] == [False, True, False]
    assert [ownership.writes(own, None, ()) for ownership in ownerships] == [False, True, False]
    assert ownerships[0].owns("m/a"), "the parameter itself stays with its first holder"
    assert ownerships[0].state_unit("m/b", "optim") == "m/b", "all ranks that hold it keep its state"


def test_state_of_a_sharded_parameter_is_written_by_a_copy_that_keeps_it() -> None:
    """Two replicas of two shards; only the second replica has an optimizer."""
    mesh = torch.arange(4).reshape(2, 2)
    parts = [on_mesh(mesh, divmod(rank, 2), (Replicate(), Shard(0)), (4,)) for rank in range(4)]
    said = [
        {"m/a": replace(unit_of(part), optimizers=("optim",) if rank > 1 else ())} for rank, part in enumerate(parts)
    ]
    writers = []
    for rank, part in enumerate(parts):
        ownership = agree(rank, said, split_replicas=False)
        writers.append(ownership.writes(ownership.state_unit("m/a", "optim"), part.ranks, part.holders))
    assert writers == [False, False, True, True]


def test_a_tensor_that_differs_between_ranks_is_refused_and_both_are_named() -> None:
    first, second = {"model/w": unit_of(whole((3,)))}, {"model/w": unit_of(whole((4,)))}
    with pytest.raises(
        UnsupportedObject,
        match=r"ranks 0 and 2 hold different tensors under the name 'model/w': shape \(3,\) and \(4,\)",
    ):
        agree(1, [first, {}, second], split_replicas=False)
    other_values = {"model/w": unit_of(whole((3,)), sample="other")}
    with pytest.raises(UnsupportedObject, match=r"ranks 0 and 1 .*other values"):
        agree(0, [first, other_values], split_replicas=False)
    with pytest.raises(UnsupportedObject, match="ranks 3 and 5"):
        agree(0, [first, other_values], split_replicas=False, members=(3, 5))


@pytest.mark.parametrize(("samples", "kept"), [("ab", True), ("aa", False), ((DIFFERS, DIFFERS), True)])
def test_buffers_that_ranks_may_hold_differently_are_kept_per_rank(samples: Sequence[str], kept: bool) -> None:
    said = [{"model/b": unit_of(whole((3,)), sample, buffer=True)} for sample in samples]
    ownership = agree(1, said, split_replicas=False)
    assert ownership.per_rank == ({"model/b"} if kept else set())
    assert not ownership.owns("model/b"), "the entry is the lowest rank's"
    assert not agree(0, said[:1], split_replicas=False).per_rank


def test_a_layout_that_changes_is_refused_and_the_rank_is_named() -> None:
    part = whole((3,))
    said = {"model/w": unit_of(part), "model/v": unit_of(part)}
    ownership = agree(1, [said, said], split_replicas=False)
    ownership.check(said)
    for changed, name, what in (
        ({"model/w": unit_of(part)}, "model/v", "is gone"),
        ({**said, "model/u": unit_of(part)}, "model/u", "is new"),
        ({**said, "model/w": unit_of(whole((4,)))}, "model/w", "is laid out differently"),
    ):
        with pytest.raises(LayoutChanged, match=f"on rank 1 '{name}' {what}") as caught:
            ownership.check(changed)
        assert "prepare()" in caught.value.hint
    with pytest.raises(LayoutChanged, match="on rank 1 'model/u' is new"):
        ownership.writes("model/u", part.ranks, part.holders)
    with pytest.raises(LayoutChanged, match="on rank 5 'model/v' is gone"):
        agree(1, [said, said], split_replicas=False, members=(3, 5)).check({})
