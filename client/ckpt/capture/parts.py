"""The parts of a tensor: the part of a global tensor that is here, and the inner tensors of a wrapper. Not a
collective; copies nothing.

DTensor covers fully_shard (FSDP2), hybrid sharding and tensor parallelism on a mesh of any dimensions. FlatRange covers
FullyShardedDataParallel (FSDP1), which keeps a range of a parameter's row-major elements. Any other tensor is
whole. Each tensor of a state has a part, so parts are msgspec structs: faster to create than data classes, and not
tracked by the garbage collector.

Wrapper subclasses (torchao, TwoTensor) have no memory of their own. torch's protocol `__tensor_flatten__` lists their
inner tensors, which are saved and restored in their place, each under its own name. A DTensor whose local tensor is a
wrapper counts as a wrapper of DTensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckptstore.errors import UnsupportedObject
from ckptstore.format import boxes
from ckptstore.format.boxes import Box
from ckptstore.values import Value

Ranks = tuple[int, ...]
"""Global ranks."""
IndexRange = tuple[int, int]
"""First index in a dimension, and the number of indices."""


class TensorPiece(Value, gc=False):
    """One box of a global tensor, and the local memory it lies in."""

    box: Box
    tensor: torch.Tensor
    """A view in the box's shape; writing to it changes the live tensor."""


class TensorPart(Value, gc=False):
    """The part of a global tensor that one rank holds."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    """Each piece is non-empty, unless the global tensor is empty."""
    ranks: Ranks | None = None
    """Global ranks among which the tensor is distributed; None: every rank that has it holds all of it."""
    cells: tuple[Ranks, ...] = ()
    """The different parts of the tensor: for each the ranks that hold it, by copy."""
    holders: Ranks = ()
    """The cell of this part. Empty: no other rank holds it."""

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of all pieces."""
        return tuple(piece.box for piece in self.pieces)


class FlatRange(NamedTuple):
    """A parameter of FullyShardedDataParallel: the elements [start, stop) of it lie in a flat local tensor."""

    shape: tuple[int, ...]
    start: int
    stop: int
    ranks: Ranks
    """Those that hold the rest of it."""

    def part(self, tensor: torch.Tensor) -> TensorPart | None:
        """The part that the local tensor is, or state of its elements; None for state that is not cut so."""
        if tensor.dim() != 1 or tensor.numel() != self.stop - self.start:
            return None
        tensor, pieces, at = tensor.detach(), [], 0
        for box in boxes.flat_boxes(self.shape, self.start, self.stop):
            size = prod(boxes.sizes(box))
            pieces.append(TensorPiece(box, tensor[at : at + size].view(boxes.sizes(box))))
            at += size
        return TensorPart(self.shape, tensor.dtype, tuple(pieces), self.ranks, _alone(self.ranks))


def part_of(path: str, tensor: torch.Tensor) -> TensorPart:
    """The part that a tensor says it is. `Leaf.part_of` also knows what only its parameter says.

    Raises UnsupportedObject for a DTensor with pending sums, or a placement this program does not know.
    """
    if isinstance(tensor, DTensor):
        return _distributed(path, tensor)
    shape = tuple(tensor.shape)
    with torch._C.DisableTorchFunctionSubclass():  # the operations of a subclass may do anything
        piece = TensorPiece(boxes.whole(shape), tensor.detach())
    return TensorPart(shape, tensor.dtype, (piece,))


@lru_cache
def _alone(ranks: Ranks) -> tuple[Ranks, ...]:
    return tuple((rank,) for rank in ranks)


def _distributed(path: str, tensor: DTensor) -> TensorPart:
    shape, local = tuple(tensor.shape), tensor.to_local().detach()
    try:
        cut = _mesh_cut(tensor.device_mesh, tensor.placements, shape)
    except UnsupportedObject as error:
        raise UnsupportedObject(f"tensor at {path!r}: {error.message}", error.hint) from None
    if tuple(local.shape) != cut.local and (local.numel() or prod(cut.local)):  # nothing has any shape
        raise UnsupportedObject(
            f"tensor at {path!r} with placements {tensor.placements} has the local shape {tuple(local.shape)}, which "
            "they do not explain",
            "Redistribute it to Shard and Replicate placements",
        )
    if not prod(shape):
        pieces: tuple[TensorPiece, ...] = (TensorPiece(boxes.whole(shape), local.new_empty(shape)),)
    else:
        pieces = tuple(TensorPiece(box, _narrow(local, box, at)) for box, at in zip(cut.boxes, cut.at, strict=True))
    return TensorPart(shape, tensor.dtype, pieces, cut.ranks, cut.cells, cut.holders)


def check_within(path: str, cells: Iterable[Ranks], members: AbstractSet[int]) -> None:
    """Raise UnsupportedObject if no member of a group holds one of the cells of a tensor. members: global ranks."""
    missing = [cell for cell in cells if members.isdisjoint(cell)]
    if missing:
        raise UnsupportedObject(
            f"{path!r} is sharded over ranks, and no rank of the group that saves holds what rank {missing[0][0]} does",
            "Save with a group whose ranks hold all of it, such as group='all', or gather the state and pass it as "
            "shared={...}",
        )


def _narrow(local: torch.Tensor, box: Box, at: Box) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(at, boxes.sizes(box), strict=True)):
        if length != local.shape[dimension]:
            local = local.narrow(dimension, start, length)
    return local


class _MeshCut(NamedTuple):
    """The part that placements on a mesh give to this rank."""

    boxes: tuple[Box, ...]
    at: tuple[Box, ...]
    """Where each box begins in the local tensor."""
    local: tuple[int, ...]
    ranks: Ranks
    cells: tuple[Ranks, ...]
    holders: Ranks


@lru_cache(maxsize=1 << 16)
def _mesh_cut(mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> _MeshCut:
    coordinate = mesh.get_coordinate()
    ranks = tuple(mesh.mesh.flatten().tolist())
    if coordinate is None:
        return _MeshCut((), (), (0,) * len(shape), ranks, (), ())
    if any(isinstance(placement, Partial) for placement in placements):
        raise UnsupportedObject(
            f"its placements {placements} say that a sum over the mesh is still to be made",
            "Redistribute it first: tensor.redistribute(placements=...)",
        )
    runs = [
        _runs(
            size,
            [
                (p, mesh.size(i), coordinate[i])
                for i, p in enumerate(placements)
                if isinstance(p, Shard | _StridedShard) and p.dim == dimension
            ],
        )
        for dimension, size in enumerate(shape)
    ]
    cells, cell = _mesh_cells(mesh, tuple(isinstance(placement, Replicate) for placement in placements))
    corners = list(product(*runs))
    return _MeshCut(
        boxes=tuple((*(start for start, _ in corner), *(length for _, length in corner)) for corner in corners),
        at=tuple(  # the indices that this rank holds before those of each run
            tuple(sum(length for _, length in held[: held.index(run)]) for held, run in zip(runs, corner, strict=True))
            for corner in corners
        ),
        local=tuple(sum(length for _, length in of_dimension) for of_dimension in runs),
        ranks=ranks,
        cells=cells,
        holders=cells[cell],
    )


@lru_cache(maxsize=256)
def _mesh_cells(mesh: DeviceMesh, replicated: tuple[bool, ...]) -> tuple[tuple[Ranks, ...], int]:
    """The ranks of a mesh that hold the same, by copy, where some of its dimensions replicate; and this rank's cell."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shards = [i for i, one in enumerate(replicated) if not one]
    order = [*shards, *(i for i, one in enumerate(replicated) if one)]
    number = 0
    for i in shards:
        number = number * mesh.size(i) + coordinate[i]
    count = prod(mesh.size(i) for i in shards)
    return tuple(map(tuple, mesh.mesh.permute(order).reshape(count, -1).tolist())), number


def _runs(size: int, shards: Sequence[tuple[Placement, int, int]]) -> list[IndexRange]:
    """The indices of one dimension that a rank holds: (placement, ranks, own coordinate) by mesh dimension.

    fully_shard after tensor parallelism says _StridedShard for "the dimensions to my right were cut first". torch's
    own compute_local_shape_and_global_offset is wrong there for uneven sizes, so the cuts are made again in
    their true order. A _StridedShard that stands for something else is an interleaved cut.
    """
    runs = [(0, size)]
    cuts: list[tuple[Placement, int, int]] = []
    right = 1
    for placement, ranks, own in reversed(shards):
        deferred = isinstance(placement, _StridedShard) and placement.split_factor == right > 1
        cuts = [*cuts, (Shard(0), ranks, own)] if deferred else [(placement, ranks, own), *cuts]
        right *= ranks
    for placement, ranks, own in cuts:
        parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        runs = [run for part in range(parts) for run in _cut(_cut(runs, parts, part), ranks, own)]
    return runs


def _cut(runs: Sequence[IndexRange], parts: int, part: int) -> list[IndexRange]:
    """Chunk `part` of `parts` of the indices in `runs`, cut as by torch.chunk."""
    total = sum(length for _, length in runs)
    step = -(-total // parts)
    begin, end = min(part * step, total), min((part + 1) * step, total)
    found, at = [], 0
    for start, length in runs:
        low, high = max(begin - at, 0), min(end - at, length)
        if low < high:
            found.append((start + low, high - low))
        at += length
    return found


_CACHED = {
    # The scale is computed from the weight after a step; a first save lacks it. Flattening would wait for the GPU.
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": (("_tensor",), ("_precomputed_scale",)),
}
"""By class: the inner tensors, and attributes that cache what follows from them. The latter are not stored."""


def is_plain_type(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or the local tensor of a DTensor, has memory of its own. Subclasses may only add attributes and
    functions."""
    kind = type(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def has_plain_elements(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its elements in memory, by strides."""
    if is_lazy(tensor) or not is_plain_type(tensor) or tensor.is_nested:
        return False
    strided = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)
    return strided and not tensor._is_zerotensor()


def inner_tensors(path: str, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The tensors that a wrapper consists of, by attribute; None for all other tensors.

    Raises UnsupportedObject for a sharded wrapper whose inner tensors are not sharded as the wrapper is.
    """
    if is_plain_type(tensor) or tensor.is_nested:
        return None
    wrapper = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if isinstance(wrapper, DTensor) or not is_traceable_wrapper_subclass(wrapper):
        return None
    known = _CACHED.get(class_name(type(wrapper)))
    names = known[0] if known else wrapper.__tensor_flatten__()[0]
    inner = {name: getattr(wrapper, name) for name in names}
    return inner if wrapper is tensor else {name: like_outer(path, tensor, one) for name, one in inner.items()}


def elements(value: Any) -> dict[str, torch.Tensor]:
    """The plain tensors that a tensor consists of. Two have the same keys if the elements of one fit into the other."""
    inner = inner_tensors("", value) if isinstance(value, torch.Tensor) else {}
    if inner is None:
        return {f"{value.dtype} {value.shape} {value.device}": value}
    return {
        f"{type(value)} {value.__tensor_flatten__()[1]} {name} {kind}": plain
        for name, one in inner.items()
        for kind, plain in elements(one).items()
    }


def drop_cached(tensor: torch.Tensor) -> None:
    """After a restore: forget what a wrapper has computed from its former values."""
    wrapper = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    for name in _CACHED.get(class_name(type(wrapper)), ((), ()))[1]:
        setattr(wrapper, name, None)


def kind_of(value: object) -> str:
    """The type of a value for messages. A DTensor's names its local tensor's, too."""
    local = type(value._local_tensor).__name__ if isinstance(value, DTensor) else ""
    return type(value).__name__ + (f" over {local}" if local not in ("", "Tensor") else "")


def memory_address(tensor: torch.Tensor) -> int:
    """The address of a tensor's memory, of a wrapper that of its first inner tensor. 0: it has no memory."""
    while inner := inner_tensors("", tensor):
        tensor = next(iter(inner.values()))
    if not has_plain_elements(tensor):
        return 0
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def like_outer(path: str, outer: DTensor, inner: torch.Tensor) -> torch.Tensor:
    """A DTensor of this local one, sharded as another. Raises UnsupportedObject if their local shapes differ."""
    if inner.shape != outer._local_tensor.shape:
        raise UnsupportedObject(
            f"tensor at {path!r} is a {kind_of(outer)} with an inner tensor of the shape {list(inner.shape)}: its "
            "placements do not show how the ranks share it",
            "Shard wrappers whose inner tensors have the shape of the wrapper, or quantize after training",
        )
    return DTensor.from_local(
        inner, outer.device_mesh, outer.placements, run_check=False, shape=outer.shape, stride=outer.stride()
    )


def class_name(kind: type) -> str:
    """The module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"
