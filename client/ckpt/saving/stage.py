"""Stage: copy the captured leaves into a slot of the arena. After it, training may go on.

This is the only stage on the training thread: it waits for memory, and for nothing else.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckpt.capture.leaves import Leaf
from ckpt.saving.messages import SliceRow
from ckpt.saving.segment import Segment
from ckptstore.shards import Placed, Slice, place_slices, raw_bytes


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


class Stager:
    """Copies into one segment, through tensors that view it; they are kept between saves."""

    def __init__(self, segment: Segment) -> None:
        self._arena = torch.frombuffer(segment.map, dtype=torch.uint8)
        self._placed: list[Placed] | None = None
        self._views: list[torch.Tensor] = []

    @torch.no_grad()
    def stage(self, leaves: Sequence[Leaf], layout: Layout) -> None:
        """Copy all leaves. On return the slot holds them, also those from a GPU."""
        if layout.placed != self._placed:
            self._views = [
                self._view(place, leaves[i].tensor) for place, i in zip(layout.placed, layout.order, strict=True)
            ]
            self._placed = layout.placed
        streams = set()
        for view, i in zip(self._views, layout.order, strict=True):
            tensor = leaves[i].tensor
            if _is_plain(tensor):
                # torch copies with all of its threads and waits for the slowest: several times slower than one
                # thread as soon as a core is busy, with the saver for instance. memmove releases the GIL.
                ctypes.memmove(view.data_ptr(), tensor.data_ptr(), view.nbytes)
                continue
            if tensor.is_cuda:
                streams.add(torch.cuda.current_stream(tensor.device))
            view.copy_(tensor, non_blocking=True)
        for stream in streams:
            stream.synchronize()

    def _view(self, place: Placed, tensor: torch.Tensor) -> torch.Tensor:
        flat = self._arena[place.at : place.at + place.slice.bytes]
        if not place.slice.bytes:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return flat.view(tensor.dtype).view(tensor.shape)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes in memory are its elements, in order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
