"""Stage: copy the captured leaves into a slot of the arena.

What may change at any time is copied on the training thread, which waits for memory and for nothing else. What only
changes in `optim.step()` may be left to another thread meanwhile (overlap.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ckpt.capture.leaves import Leaf
from ckpt.saving.messages import SliceRow
from ckpt.saving.segment import Segment
from ckpt.saving.transfer import Move, Transfer, pin
from ckptstore.format.shards import Placed, Slice, place_slices, raw_bytes

Later = Callable[[Leaf], bool]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the leaves of a snapshot lie in its slot: the raw stream of the shard to be."""

    slices: list[Slice]
    """In the order of capture."""
    placed: list[Placed]
    order: list[int]
    """Index of the leaf at each place."""
    rows: list[SliceRow]
    num_bytes: int

    @staticmethod
    def of(leaves: Sequence[Leaf]) -> Layout:
        """The layout that these leaves have in every save."""
        slices = [leaf.slice for leaf in leaves]
        placed = place_slices(slices)
        index = {piece: i for i, piece in enumerate(slices)}
        order = [index[place.slice] for place in placed]
        rows = [
            SliceRow(piece.entry, piece.dtype, piece.shape, piece.box, place.at)
            for place in placed
            for piece in [place.slice]
        ]
        return Layout(slices, placed, order, rows, raw_bytes(placed))


@dataclass(frozen=True, slots=True)
class _Plan:
    """How leaves get into a slot: by address where they are plain memory."""

    sameness: object | None
    now: list[Move] = field(default_factory=list)
    later: list[tuple[Move, int]] = field(default_factory=list)
    others: list[tuple[Placed, int, bool]] = field(default_factory=list)
    """Not plain memory, and whether they may wait."""


class Stager:
    """Copies into one segment. The training thread begins a copy; the transfer that it gets may be finished by another.

    Nothing of the training loop is held between saves.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._arena = torch.frombuffer(segment.map, dtype=torch.uint8)
        self._address = self._arena.data_ptr()
        self._pinned = False
        self._plan: _Plan | None = None

    def stage(self, leaves: Sequence[Leaf], layout: Layout, sameness: object | None = None) -> None:
        """Copy all leaves. On return the slot holds them, also those from a GPU. sameness: see `Captured`."""
        self.begin(leaves, layout, None, sameness).finish()

    @torch.no_grad()
    def begin(
        self, leaves: Sequence[Leaf], layout: Layout, later: Later | None, sameness: object | None = None
    ) -> Transfer:
        """Copy the leaves that may change at any time, but for those that are on a GPU: they are on their way, in the
        order of the current stream. What `later` says may wait goes with `Transfer.copy`.

        sameness: if it is not None and equals the one before, leaves and `later` are as they were then.
        """
        plan = self._plan
        if plan is None or sameness is None or plan.sameness != sameness:
            plan = self._plan = self._make_plan(leaves, layout, later, sameness)
        transfer = Transfer()
        # torch copies with all of its threads and waits for the slowest: several times slower than one
        # thread as soon as a core is busy, with the saver for instance. memmove releases the GIL.
        for move in plan.now:
            ctypes.memmove(*move)
        for move, i in plan.later:
            transfer.add_move(move, leaves[i])
        for place, i, waits in plan.others:
            self._begin_other(transfer, place, leaves[i], waits)
        transfer.begun()
        return transfer

    def _make_plan(self, leaves: Sequence[Leaf], layout: Layout, later: Later | None, sameness: object | None) -> _Plan:
        plan = _Plan(sameness)
        for place, i in zip(layout.placed, layout.order, strict=True):
            tensor, waits = leaves[i].tensor, later is not None and later(leaves[i])
            move = (self._address + place.at, tensor.data_ptr(), tensor.nbytes)
            if not is_plain(tensor):
                plan.others.append((place, i, waits))
            elif waits:
                plan.later.append((move, i))
            else:
                plan.now.append(move)
        return plan

    def _begin_other(self, transfer: Transfer, place: Placed, leaf: Leaf, waits: bool) -> None:
        view = self._view(place, leaf.tensor)
        if leaf.tensor.is_cuda:
            self._pin()
            transfer.add_device_copy(view, leaf, waits)
        elif waits:
            transfer.add_copy(view, leaf)
        else:
            view.copy_(leaf.tensor)

    def _view(self, place: Placed, tensor: torch.Tensor) -> torch.Tensor:
        flat = self._arena[place.at : place.at + place.slice.bytes]
        if not place.slice.bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return flat.view(tensor.dtype).view(tensor.shape)

    def _pin(self) -> None:
        if not self._pinned:
            pin(self._segment)
            self._pinned = True


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in memory are its elements, in order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
