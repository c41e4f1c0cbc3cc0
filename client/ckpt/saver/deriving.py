"""Weights that are casts of float32 masters in the same snapshot are not stored but derived. No torch.

Training in mixed precision keeps float32 weights in the optimizer and trains with their casts. Candidates are slices of
equal shape and box; a sample dismisses nearly all that are none, and every element of the rest is compared.
docs/decisions/0017 has the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ckptstore.format.boxes import Box
from ckptstore.format.casting import CAST_TYPES, SOURCE, cast, is_cast
from ckptstore.format.shards import Placed

LEAST_BYTES = 64 << 10
"""Smaller slices are stored: they share chunks, and are few bytes together."""
_SAMPLES = 64


@dataclass(frozen=True, slots=True)
class Derived:
    """A slice that is not stored, and the one that it is the cast of."""

    place: Placed
    source: Placed


def divide(placed: Sequence[Placed], raw: memoryview) -> tuple[list[Placed], list[Derived]]:
    """The slices of a snapshot that are to be stored, and those that follow from these. Pure.

    Each slice is the source of one other at most.
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


def in_stream(stored: Sequence[Placed], derived: Sequence[Derived]) -> tuple[list[Placed], list[Placed]]:
    """Where stored slices lie in the raw stream, which the others are left out of, and where their sources do. Pure."""
    moved: dict[int, int] = {}
    end = 0
    for place in stored:
        moved[place.at] = end
        end += place.slice.bytes
    places = [replace(place, at=moved[place.at]) for place in stored]
    return places, [Placed(one.place.slice, moved[one.source.at]) for one in derived]
