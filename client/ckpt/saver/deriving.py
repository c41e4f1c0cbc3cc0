"""Weights that are casts of float32 masters in the same snapshot are derived from them instead of stored.

Mixed-precision training keeps float32 weights in the optimizer and trains with their casts. Candidates are slices of
equal shape and box; a sample rejects nearly all that differ, and all elements of the rest are compared.
docs/decisions/0017 has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from ckptstore.codecs.dtypes import CAST_TYPES, SOURCE, cast, is_cast
from ckptstore.format.boxes import Box
from ckptstore.format.shards import Placed
from ckptstore.names import of_optimizer

LEAST_BYTES = 64 << 10
"""Smaller slices are always stored: they share chunks, and their total size is small."""
_SAMPLES = 64


class Derived(NamedTuple):
    """A slice that is not stored, and the slice that it is a cast of."""

    place: Placed
    source: Placed


def divide(placed: Sequence[Placed], raw: memoryview) -> tuple[list[Placed], list[Derived]]:
    """The slices of a snapshot to store, and those that are derived from these. Pure.

    Each slice is the source of at most one other.
    """
    sources: dict[tuple[tuple[int, ...], Box], list[Placed]] = {}
    for place in placed:
        if place.slice.dtype == SOURCE:
            sources.setdefault((place.slice.shape, place.slice.box), []).append(place)
    stored: list[Placed] = []
    derived: list[Derived] = []
    for place in placed:
        piece = place.slice
        candidates = sources.get((piece.shape, piece.box), [])
        source = None
        if piece.dtype in CAST_TYPES and piece.bytes >= LEAST_BYTES:
            source = next((one for one in candidates if _follows(raw, place, one)), None)
        if source is None:
            stored.append(place)
        else:
            candidates.remove(source)
            derived.append(Derived(place, source))
    return stored, derived


def _follows(raw: memoryview, place: Placed, source: Placed) -> bool:
    words = np.frombuffer(raw[place.at : place.at + place.slice.bytes], np.uint16)
    bits = np.frombuffer(raw[source.at : source.at + source.slice.bytes], np.uint32)
    step, dtype = max(1, len(words) // _SAMPLES), place.slice.dtype
    sampled = np.array_equal(cast(bits[::step], dtype), words[::step])
    return sampled and is_cast(bits, dtype, words)


LEAST_OPTIMIZER_BYTES = 1 << 20
"""A rank's optimizer state of fewer bytes is stored with the rest: thinning would free little."""


def divide_by_use(placed: Sequence[Placed], derived: Sequence[Derived]) -> tuple[list[Placed], list[Placed]]:
    """The stored slices of a rank's first shard and of the second, which a thinned checkpoint lacks: optimizer
    state from which no weights are derived. Pure."""
    sources = {one.source.at for one in derived}
    optimizer = [one for one in placed if of_optimizer(one.slice.entry) and one.at not in sources]
    if sum(one.slice.bytes for one in optimizer) < LEAST_OPTIMIZER_BYTES:
        return [*placed], []
    apart = set(map(id, optimizer))
    return [one for one in placed if id(one) not in apart], optimizer


def in_stream(stored: Sequence[Placed], derived: Sequence[Derived]) -> tuple[list[Placed], list[Placed]]:
    """Places in the raw stream of stored slices: of these slices, and of the sources of derived slices. Pure."""
    moved: dict[int, int] = {}
    end = 0
    for place in stored:
        moved[place.at] = end
        end += place.slice.bytes
    places = [replace(place, at=moved[place.at]) for place in stored]
    return places, [Placed(one.place.slice, moved[one.source.at]) for one in derived]
