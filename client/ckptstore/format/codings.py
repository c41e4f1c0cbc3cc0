"""Codings: the codec and level for chunks of an element type, from the fastest to the smallest."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ckptstore.format.codecs import RAW, best_codec


class Coding(NamedTuple):
    """A codec and its level. Only writers need the level: readers decode all levels alike."""

    codec: str
    level: int = 1


CodingPolicy = Callable[[str], Coding]
"""The coding of each element type."""


def off(dtype: str) -> Coding:
    """No encoding."""
    return Coding(RAW)


def fast(dtype: str) -> Coding:
    """The smallest coding that keeps up with disks and networks."""
    return Coding(best_codec(dtype))


def smallest(dtype: str) -> Coding:
    """The smallest coding, however slow."""
    return Coding(best_codec(dtype), 9)


POLICIES: dict[str, CodingPolicy] = {"off": off, "fast": fast, "max": smallest}
"""Policies by the value of the `compress` option."""


def codings(dtype: str) -> tuple[Coding, ...]:
    """All codings of an element type; each costs more and stores less than the one before."""
    return tuple(dict.fromkeys(policy(dtype) for policy in POLICIES.values()))
