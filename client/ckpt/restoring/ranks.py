"""Per-rank state under a different world size than at the save. Pure.

An item that was equal on all saved ranks goes to every rank. RNG state that differed, or that a single rank saved: a
rank that existed at the save keeps its own, and an additional rank derives a seed from a saved one. An object that can
take the states of all ranks (`load_state_dicts`), such as a data loader, redistributes them. Anything else that is to
be restored is refused, or with strict=False taken from rank (own rank modulo saved ranks).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import msgspec
import xxhash

from ckpt.capture.train_state import RESERVED, RNG
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import JSON

Items = Mapping[str, JSON]


@runtime_checkable
class Redistributable(Protocol):
    """An object that can redistribute its state to another number of ranks, such as a data loader."""

    def load_state_dicts(self, states: Sequence[Any]) -> Any:
        """Take this rank's share of the states of all saved ranks, given in rank order."""


@dataclass(frozen=True, slots=True)
class RankState:
    """The saved state that one rank restores."""

    items: dict[str, JSON] = field(default_factory=dict)
    redistributed: dict[str, list[JSON]] = field(default_factory=dict)
    """The states of all saved ranks, for objects that redistribute them."""
    seed: int | None = None
    """Seed of the random numbers, if they are derived."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""


def share_out(
    saved: Sequence[Items], rank: int, world_size: int, objects: Mapping[str, Any], strict: bool
) -> RankState:
    """The state that `rank` of `world_size` restores from the items of another number of saved ranks.

    objects: the objects to restore, by item. Raises StateMismatch if strict and an item cannot be redistributed.
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
            chosen[item] = tree
            if item in objects or item in RESERVED:
                different.append(item)
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
        notes.append(f"{', '.join(sorted(redistributed))}: the states of all ranks were redistributed")
    if different:
        notes.append(f"{', '.join(sorted(different))}: taken from rank (own rank modulo {count})")
    return tuple(notes)


def _ranks(start: int, stop: int) -> str:
    return f"rank {start}" if stop == start + 1 else f"ranks {start} to {stop - 1}"
