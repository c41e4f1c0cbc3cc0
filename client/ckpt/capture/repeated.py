"""Capture save after save: as long as the objects are the same, what they were described as is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt.capture import optimizers
from ckpt.capture.describe import optimizer_frame
from ckpt.capture.glance import Glance, Looks
from ckpt.capture.leaves import Captured, Change, Collector, Leaf, Leaves
from ckpt.capture.ownership import Ownership
from ckpt.capture.state import capture, capture_local, capture_objects
from ckpt.capture.train_state import TrainState
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import TAG, merge_trees


class _View(NamedTuple):
    """A part of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Places:
    """Where leaves are found again, column by column: no tensor is held between saves."""

    slices: list[Slice]
    tensors: list[int]
    """Which of those that a glance sees."""
    views: dict[int, _View]
    """Of leaves, by their number, that are a part of their tensor."""
    changes: list[Change]


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    """What objects were described as, and what they looked like then."""

    looks: Looks
    ownership: Ownership
    places: _Places
    collector: Collector
    """Knows names and memory; its leaves are given up."""
    trees: Mapping[str, JSON]
    aliases: Mapping[str, str]
    groups: Mapping[str, Sequence[Sequence[Sequence[str]]]]
    """Names of parameters by item, optimizer and group, where this rank tells the groups."""


class Capturer:
    """Captures one run's saves. Used by the training thread."""

    def __init__(self) -> None:
        self._described: _Described | None = None

    @torch.no_grad()
    def capture(self, state: TrainState, ownership: Ownership, grads: bool) -> Captured:
        """See ckpt.capture.state.capture, which this equals."""
        if grads:  # they come and go
            return capture(state, ownership, grads)
        state.reshard()
        glance, described = Glance.at(state), self._described
        if (
            glance is None
            or described is None
            or described.ownership is not ownership
            or not described.looks.alike(glance)
        ):
            collector = capture_objects(state, ownership)
            captured = collector.captured
            described = None if glance is None else _describe(state, ownership, glance, collector)
            self._described = described
        else:
            collector, captured = described.collector, _again(described, state, glance)
        shared = len(captured.leaves)
        capture_local(collector.beside(captured), state)
        captured.sameness = described if len(captured.leaves) == shared else None
        return captured


def _describe(state: TrainState, ownership: Ownership, glance: Glance, collector: Collector) -> _Described | None:
    """None if leaves lie in tensors that were not seen."""
    numbers, leaves = {id(tensor): number for number, tensor in enumerate(glance.tensors)}, collector.captured.leaves
    if not all(id(origin) in numbers for origin in leaves.origins):
        return None
    places = _Places(
        slices=list(leaves.slices),
        tensors=[numbers[id(origin)] for origin in leaves.origins],
        views={i: view for i, leaf in enumerate(leaves) if (view := _view(leaf)) is not None},
        changes=list(leaves.changes),
    )
    captured = collector.captured
    groups = {
        item: [[[n for held in group for n in held] for group in optimizers.named_groups(o, state)] for o in found]
        for item, found in state.optimizers.items()
        if ownership.owns(optimizer_frame(item, state))
    }
    known = collector.beside(Captured())
    return _Described(Looks(glance), ownership, places, known, dict(captured.trees), dict(captured.aliases), groups)


def _local(origin: torch.Tensor) -> torch.Tensor:
    return origin._local_tensor if isinstance(origin, DTensor) else origin


def _view(leaf: Leaf) -> _View | None:
    local, tensor = _local(leaf.origin), leaf.tensor
    if (tensor.data_ptr(), tensor.shape, tensor.stride()) == (local.data_ptr(), local.shape, local.stride()):
        return None
    return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _again(described: _Described, state: TrainState, glance: Glance) -> Captured:
    """What is captured of objects that look as they did."""
    places = described.places
    tensors = [glance.locals[number] for number in places.tensors]
    origins = None
    if places.views or glance.locals is not glance.tensors:
        origins = [glance.tensors[number] for number in places.tensors]
        for i, view in places.views.items():
            tensors[i] = tensors[i].as_strided(*view)
    captured = Captured(
        leaves=Leaves(places.slices, tensors, origins, places.changes),
        trees=dict(described.trees),
        aliases=dict(described.aliases),
    )
    for item, of_optimizers in described.groups.items():
        frame: JSON = {}
        for optimizer, names in zip(state.optimizers[item], of_optimizers, strict=True):
            frame = merge_trees(frame, _groups(described.collector, item, optimizer, names), item)
        captured.trees[item] = {**described.trees[item], **frame}
    return captured


def _groups(collector: Collector, item: str, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> JSON:
    """The tree of an optimizer's groups; names are text, and need not be encoded each time."""
    tree = collector.inline(item, {"groups": optimizers.describe_groups(optimizer, [[] for _ in names])})
    if any(TAG in group for group in tree["groups"]):  # with options of odd names
        return collector.inline(item, {"groups": optimizers.describe_groups(optimizer, names)})
    for group, known in zip(tree["groups"], names, strict=True):
        group["params"] = known
    return tree
