"""Ownership: which rank writes what. Every rank computes it from the units exchanged at the first save. Pure.

The unit is a parameter (or buffer), with all state an optimizer keeps for it. Where only some of the ranks that hold a
parameter have it in their optimizer, this state is a unit of its own, and they are its holders. Parts that differ
between the ranks of a mesh are written by each of these ranks; of several equal copies, one is written:

- a tensor that placements distribute over a mesh: by the mesh that holds the unit's first holder, and of
  the copies within it by the first one that the group holds;
- a tensor that ranks hold whole: by the unit's first holder, the lowest rank that has any of it.

A buffer that ranks hold differently is also kept per rank: one that differed when the ranks agreed, and statistics of
batches that no wrapper is known to keep equal.

With split_replicas=True the units are distributed over the copies, largest first, so that all replicas write about the
same number of bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import msgspec

from ckptstore.errors import LayoutChanged, UnsupportedObject
from ckptstore.values import Value

DIFFERS = "differs"
"""The sample of a buffer that is of the batches of one rank."""


class Unit(Value, array_like=True):
    """One rank's description of a parameter or buffer that it holds, in whole or in part."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, ...], ...]
    distributed: bool
    """Whether placements define how ranks share it."""
    bytes: int
    """Size of the whole tensor."""
    sample: str = msgspec.field(default="")
    """Digest of some values, where only they show whether ranks hold copies of one tensor."""
    buffer: bool = False
    optimizers: tuple[str, ...] = ()
    """The items of this rank's optimizers that keep its state."""

    @property
    def layout(self) -> tuple[Any, ...]:
        """The fields that must not change between saves."""
        return (self.dtype, self.shape, self.boxes, self.distributed)


Units = Mapping[str, Unit]
"""Units by name: item/parameter."""


class Ownership(NamedTuple):
    """The assignment of writes to ranks, seen from one rank."""

    rank: int
    own: Units
    """This rank's units."""
    owner: Mapping[str, int]
    """The first holder of each unit."""
    turn: Mapping[str, int]
    """Number of the copy of each unit that is written, modulo the number of copies."""
    holders: Mapping[str, tuple[int, ...]]
    members: tuple[int, ...] | None = None
    """The global ranks of the group, by rank; None: all ranks."""
    per_rank: AbstractSet[str] = frozenset()
    """The units of buffers that each holder also keeps for itself."""

    def state_unit(self, unit: str, item: str) -> str:
        """The unit of the state that optimizers of an item keep for a unit."""
        own = _state_unit(unit, item)
        return own if own in self.owner else unit

    def owns(self, unit: str) -> bool:
        """Whether this rank owns a unit: it writes the unit's node in the tree. Raises LayoutChanged for a new unit."""
        if unit not in self.owner:
            raise self._changed(unit, "is new")
        return self.owner[unit] == self.rank

    def writes(self, unit: str, ranks: Sequence[int] | None, holders: Sequence[int]) -> bool:
        """Whether this rank stores its part of a tensor that belongs to a unit. Raises LayoutChanged for a new unit.

        ranks, holders: see TensorPart.
        """
        if ranks is not None and unit in self.owner:
            if unit not in self.own:
                among = {self._global(rank) for rank in self.holders[unit]}
                holders = [rank for rank in holders if rank in among]
            if self.members is not None:
                holders = [rank for rank in holders if rank in self.members]
            # One of the ranks that hold equal copies writes: the one whose turn it is.
            turn = not holders or holders[self.turn[unit] % len(holders)] == self._global(self.rank)
            return turn and self._global(self.owner[unit]) in ranks
        if unit not in self.own or self.own[unit].distributed:
            return self.owns(unit)  # a scalar in the state of a distributed parameter
        copies = self.holders[unit]
        return copies[self.turn[unit] % len(copies)] == self.rank

    def _global(self, rank: int) -> int:
        return rank if self.members is None else self.members[rank]

    def check(self, units: Units) -> None:
        """Raise LayoutChanged if this rank's units, or their boxes, differ from those it exchanged."""
        for name in sorted(units.keys() | self.own.keys()):
            now, then = units.get(name), self.own.get(name)
            if now is None or then is None or now.layout != then.layout:
                change = "is new" if then is None else "is gone" if now is None else "is laid out differently"
                raise self._changed(name, change)

    def _changed(self, name: str, change: str) -> LayoutChanged:
        return LayoutChanged(
            f"on rank {self._global(self.rank)} {name!r} {change} since the ranks agreed on who writes what",
            "Call prepare() on all ranks with the objects as they are now, then save again",
        )


def agree(rank: int, said: Sequence[Units], split_replicas: bool, members: tuple[int, ...] | None = None) -> Ownership:
    """The ownership that follows from all ranks' units, in rank order.

    members: the global ranks of the group that saves, by rank; None: all ranks.
    Raises UnsupportedObject if ranks hold different tensors under one name: one of them would be lost.
    """
    holders: dict[str, list[int]] = defaultdict(list)
    for holder, units in enumerate(said):
        for name in units:
            holders[name].append(holder)
    named = range(len(said)) if members is None else members
    per_rank = {n for n, ranks in holders.items() if _may_differ(n, [(named[r], said[r][n]) for r in ranks])}
    ordered = {name: tuple(ranks) for name, ranks in holders.items()}
    for name, ranks in holders.items():
        for item in {item for rank in ranks for item in said[rank][name].optimizers}:
            keepers = tuple(rank for rank in ranks if item in said[rank][name].optimizers)
            if len(keepers) < len(ranks):
                ordered[_state_unit(name, item)] = keepers
    owner = {name: ranks[0] for name, ranks in ordered.items()}
    turn = dict.fromkeys(ordered, 0)
    sizes = {name: said[owner[name]][name].bytes for name in holders.keys() - per_rank} if split_replicas else {}
    loads: dict[tuple[int, ...], list[int]] = {}
    # Each unit, largest first, goes to the copy with the fewest bytes so far among units with the same holders.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load = loads.setdefault(ordered[name], [0] * len(ordered[name]))
        turn[name] = load.index(min(load))
        load[turn[name]] += sizes[name]
    return Ownership(rank, said[rank], owner, turn, ordered, members, per_rank)


def _state_unit(unit: str, item: str) -> str:
    return f"{item}#{unit}"


def _may_differ(name: str, found: Sequence[tuple[int, Unit]]) -> bool:
    """Whether a buffer differs between ranks, or will. Raises UnsupportedObject for a parameter that does.

    found: what each global rank holds.
    """
    first_rank, first = found[0]
    unequal = False
    for rank, unit in found[1:]:
        differ = [field for field in ("dtype", "shape", "distributed") if getattr(unit, field) != getattr(first, field)]
        unequal |= not unit.distributed and (unit.sample != first.sample or unit.sample == DIFFERS)
        if not differ and (unit.buffer or not unequal):
            continue
        what = f"{differ[0]} {getattr(first, differ[0])} and {getattr(unit, differ[0])}" if differ else "other values"
        raise UnsupportedObject(
            f"ranks {first_rank} and {rank} hold different tensors under the name {name!r}: {what}",
            "Give parameters that are not copies of each other names of their own (a pipeline stage keeps its "
            "parameters' names in the whole model), shard them as DTensor, or make the copies equal",
        )
    return unequal
