"""Codings: which codec at which level encodes chunks of an element type, from the cheapest to the smallest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptstore.format.codecs import RAW, best_codec


class Coding(NamedTuple):
    """A codec and its level. The level is the writer's business: any level is read alike."""

    codec: str
    level: int = 1


CodingPolicy = Callable[[str], Coding]
"""The coding of each element type."""


def off(dtype: str) -> Coding:
    """Bytes as they are."""
    return Coding(RAW)


def fast(dtype: str) -> Coding:
    """The smallest among those that keep up with disks and networks."""
    return Coding(best_codec(dtype))


def smallest(dtype: str) -> Coding:
    """The smallest, at any price."""
    return Coding(best_codec(dtype), 9)


POLICIES: dict[str, CodingPolicy] = {"off": off, "fast": fast, "max": smallest}
"""By the word that users say."""


def codings(dtype: str) -> tuple[Coding, ...]:
    """All there are to choose from for an element type: each costs more and stores less than the one before."""
    return tuple(dict.fromkeys(policy(dtype) for policy in POLICIES.values()))
