"""State that belongs to ranks, when there are as many as at the save, and when there are not. Pure.

Under another world size, for each item: what no two ranks had differently is everybody's. Random numbers: a rank that
existed goes on with its own, a further one with numbers derived from an existing one's; so it is with those of a single
rank, too. A data loader that can take the states of all ranks (`load_state_dicts`) redistributes them. Anything else is
refused, or with strict=False taken from rank (own rank modulo saved ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec
import xxhash

from ckpt.capture.train_state import RNG
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import JSON

Items = Mapping[str, JSON]


@runtime_checkable
class Redistributable(Protocol):
    """A data loader, say, that can share out its position anew under another number of ranks."""

    def load_state_dicts(self, states: Sequence[Any]) -> Any:
        """Take this rank's share of what all saved ranks had, given in rank order."""


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank takes over."""

    items: dict[str, JSON] = field(default_factory=dict)
    redistributed: dict[str, list[JSON]] = field(default_factory=dict)
    """For objects that take the states of all ranks."""
    seed: int | None = None
    """For random numbers, if they are derived."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


def share_out(
    saved: Sequence[Items], rank: int, world_size: int, objects: Mapping[str, Any], strict: bool
) -> RankState:
    """What `rank` of `world_size` takes over of the saved ranks' items, when their number was another.

    objects: what will take the items, by name. Raises StateMismatch if strict and an item fits nobody.
    """
    own = saved[rank % len(saved)]
    chosen: dict[str, JSON] = {}
    redistributed: dict[str, list[JSON]] = {}
    different = []
    for item, tree in own.items():
        alike = all(other.get(item) == tree for other in saved)
        if item == RNG and (len(saved) == 1 or not alike):
            if rank < len(saved):
                chosen[item] = tree
        elif alike:
            chosen[item] = tree
        elif isinstance(objects.get(item), Redistributable) and all(item in other for other in saved):
            redistributed[item] = [other[item] for other in saved]
        else:
            different.append(item)
            chosen[item] = tree
    if different and strict:
        raise StateMismatch(
            f"the checkpoint was saved by {len(saved)} ranks and is restored by {world_size}, and "
            f"{', '.join(sorted(different))} differed between ranks",
            "Give the object a method load_state_dicts(states) that takes its share of all ranks' states, or pass "
            "strict=False to give each rank the state of rank (own rank modulo saved ranks)",
        )
    seed = _seed(own[RNG], rank, world_size) if RNG in own and RNG not in chosen else None
    return RankState(chosen, redistributed, seed, _notes(saved, world_size, redistributed, different))


def _seed(tree: JSON, rank: int, world_size: int) -> int:
    return xxhash.xxh3_64_intdigest(msgspec.json.encode([tree, rank, world_size]))


def _notes(
    saved: Sequence[Items], world_size: int, redistributed: Mapping[str, Any], different: Sequence[str]
) -> tuple[str, ...]:
    count = len(saved)
    numbers = f"{_ranks(0, min(count, world_size))} with the random numbers they had"
    if count > 1 and all(other.get(RNG) == saved[0].get(RNG) for other in saved):
        numbers = "with the random numbers that all ranks had"
    elif world_size > count:
        numbers += f", {_ranks(count, world_size)} with derived ones"
    notes = [f"saved by {count}, restored by {world_size} ranks: {numbers}"]
    if redistributed:
        notes.append(f"{', '.join(sorted(redistributed))}: the states of all ranks were shared out anew")
    if different:
        notes.append(f"{', '.join(sorted(different))}: taken from rank (own rank modulo {count})")
    return tuple(notes)


def _ranks(start: int, stop: int) -> str:
    return f"rank {start}" if stop == start + 1 else f"ranks {start} to {stop - 1}"
