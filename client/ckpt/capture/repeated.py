"""Capture save after save: as long as the objects are the same, what they were described as is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ckpt.capture import optimizers
from ckpt.capture.describe import optimizer_frame
from ckpt.capture.glance import Glance
from ckpt.capture.leaves import Captured, Change, Collector, Leaf
from ckpt.capture.ownership import Ownership
from ckpt.capture.state import capture, capture_local, capture_objects
from ckpt.capture.subject import Subject
from ckptstore.format.documents import JSON
from ckptstore.format.shards import Slice
from ckptstore.format.trees import merge_trees


class _View(NamedTuple):
    """A part of a tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Place(NamedTuple):
    """Where a leaf is found again: no tensor is held between saves."""

    slice: Slice
    tensor: int
    """Which of those that a glance sees."""
    view: _View | None
    change: Change
    distributed: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Described:
    """What objects were described as, and what they looked like then."""

    marks: list[object]
    ownership: Ownership
    places: list[_Place]
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
    def capture(self, subject: Subject, ownership: Ownership, grads: bool) -> Captured:
        """See ckpt.capture.state.capture, which this equals."""
        if grads:  # they come and go
            return capture(subject, ownership, grads)
        subject.reshard()
        glance, described = Glance.at(subject), self._described
        if (
            glance is None
            or described is None
            or described.ownership is not ownership
            or described.marks != glance.marks
        ):
            collector = capture_objects(subject, ownership)
            described = None if glance is None else _describe(subject, ownership, glance, collector)
            self._described = described
        else:
            collector = _again(described, subject, glance.tensors)
        captured = collector.captured
        shared = len(captured.leaves)
        capture_local(collector if described is None else collector.beside(captured), subject)
        captured.sameness = described if len(captured.leaves) == shared else None
        return captured


def _describe(subject: Subject, ownership: Ownership, glance: Glance, collector: Collector) -> _Described | None:
    """None if leaves lie in tensors that were not seen."""
    numbers = {id(tensor): number for number, tensor in enumerate(glance.tensors)}
    places = []
    for leaf in collector.captured.leaves:
        number = numbers.get(id(leaf.origin))
        if number is None:
            return None
        places.append(_Place(leaf.slice, number, _view(leaf), leaf.change, isinstance(leaf.origin, DTensor)))
    parameters, captured = subject.parameters(), collector.captured
    groups = {
        item: [[[n for held in group for n in held] for group in optimizers.named_groups(o, parameters)] for o in found]
        for item, found in subject.optimizers.items()
        if ownership.owns(optimizer_frame(item, found, parameters))
    }
    known = collector.beside(Captured())
    return _Described(glance.marks, ownership, places, known, dict(captured.trees), dict(captured.aliases), groups)


def _local(origin: torch.Tensor) -> torch.Tensor:
    return origin._local_tensor if isinstance(origin, DTensor) else origin


def _view(leaf: Leaf) -> _View | None:
    local, tensor = _local(leaf.origin), leaf.tensor
    if (tensor.data_ptr(), tensor.shape, tensor.stride()) == (local.data_ptr(), local.shape, local.stride()):
        return None
    return _View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _again(described: _Described, subject: Subject, tensors: Sequence[torch.Tensor]) -> Collector:
    """What is captured of objects that look as they did."""
    captured = Captured(trees=dict(described.trees), aliases=dict(described.aliases))
    for piece, number, view, change, distributed in described.places:
        origin = tensors[number]
        local = origin._local_tensor if distributed else origin  # type: ignore[attr-defined]
        captured.leaves.append(Leaf(piece, local if view is None else local.as_strided(*view), origin, change))
    for item, of_optimizers in described.groups.items():
        frame: JSON = {}
        for optimizer, names in zip(subject.optimizers[item], of_optimizers, strict=True):
            groups = optimizers.describe_groups(optimizer, names)
            frame = merge_trees(frame, described.collector.inline(item, {"groups": groups}), item)
        captured.trees[item] = {**described.trees[item], **frame}
    return described.collector.beside(captured)
