"""The plan of a restore: where the entries of a checkpoint go, what does not fit, and who restores state of a rank.

Steps that must follow the placement of all bytes are collected in `finish`, to be run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import xxhash

from ckpt.capture.train_state import RESERVED, RNG
from ckpt.restoring.host_destinations import HostDestinations
from ckpt.restoring.surgery import NO_SURGERY, Difference, Differences, Matching, Shape, Surgery, suggested
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import JSON
from ckptstore.format.trees import entry_of
from ckptstore.values import Value

_SHOWN = 8
_CHANGED = "the objects were changed, and must be built again before that or any training"


class RestorePlan(msgspec.Struct):
    """Destinations of the entries, differences from the live objects, and the final steps."""

    destinations: HostDestinations
    finish: list[Callable[[], object]] = []
    restore_rng: Callable[[], None] | None = None
    """Puts the saved random state back, after all of `finish`; None if the checkpoint has none for this rank."""
    values: dict[str, Any] = {}
    missing: list[str] = []
    """Requested, but not in the checkpoint."""
    unexpected: list[str] = []
    """In a requested item of the checkpoint, but without a destination on this rank."""
    mismatched: list[str] = []
    """Different shape (left unchanged, without optimizer state), different dtype (cast), or different optimizer class
    (loaded anyway)."""
    unused: list[str] = []
    """Items of the checkpoint that the caller did not request."""
    items: list[str] = []
    """All items of the checkpoint."""
    strict: bool = True
    """Whether all must fit; set before `finish` is run."""
    resized: set[int] = set()
    """Ids of the live tensors whose shape differs."""
    overwritten: set[str] = set()
    """Live state that is overwritten: tensors of modules, and items of optimizers that have state."""
    refused: StateMismatch | None = None
    """The reason why it cannot be restored, even with strict=False."""
    own: Mapping[str, str] = {}
    """The entries that this rank had in place of others, by the names of these."""
    unchecked: bool = False
    """Whether an older version saved it that lost optimizer state of ranks."""
    notes: Sequence[str] = ()
    """How state of ranks was redistributed, for the user."""
    surgery: Surgery = NO_SURGERY
    matching: Matching = msgspec.field(default_factory=lambda: Matching({}, set(), {}))
    here: dict[str, str] = {}
    """Shape and type of a tensor that does not match, by path."""
    there: dict[str, JSON] = {}
    """The tree that the checkpoint has in its place."""

    def renamed(self, saved: Iterable[tuple[str, JSON]], prefix: str = "") -> dict[str, JSON]:
        """Saved values by the names here, without those that are left out. prefix: of the names in optimizers."""
        if not (names := self.matching.names):
            return dict(saved)
        found = ((names.get(prefix + name, prefix + name), tree) for name, tree in saved)
        return {name.removeprefix(prefix): tree for name, tree in found if name is not None}

    @property
    def differences(self) -> Differences:
        """The table of what did not match on this rank."""
        rows = [f"{name}: not in the checkpoint" for name in self.missing]
        rows += [f"{name}: only in the checkpoint" for name in self.unexpected]
        found = (row.partition(": ") for row in rows + self.mismatched)
        return suggested(Difference(name, self.here.get(name, ""), self._there(name), why) for name, _, why in found)

    def saved_as(self, tree: JSON) -> tuple[str, Shape]:
        """Type and shape of a saved tensor; nothing for other values."""
        entry = entry_of(tree)
        return ("", ()) if entry is None else self.destinations.entry(entry)

    def _there(self, name: str) -> str:
        dtype, shape = self.saved_as(self.there.get(name))
        return dtype and f"{list(shape)} {dtype}"

    def has(self, trees: Mapping[str, JSON], item: str) -> bool:
        """Whether the checkpoint has an item that was requested; records it as missing otherwise."""
        if item not in trees:
            self.missing.append(item)
        return item in trees

    def fit(self, overwritten: Collection[str]) -> RestoreFit:
        """overwritten: what earlier plans that failed have overwritten on this rank."""
        left = sorted(set(overwritten) - self.overwritten - set(self.items))
        refused = None if self.refused is None else (self.refused.message, self.refused.hint)
        return RestoreFit(
            self.unexpected, _names(self.missing), _names(self.mismatched), ", ".join(self.items), refused, _names(left)
        )


class RestoreFit(NamedTuple):
    """How a plan fits the objects of its rank; JSON types, because all ranks must know it. Names are shortened."""

    unexpected: Sequence[str]
    """All of them: other ranks may have a destination."""
    missing: str
    mismatched: str
    items: str
    refused: Sequence[str] | None
    """Message and hint of `RestorePlan.refused`."""
    left: str
    """Live state that an earlier, failed plan overwrote and this one does not refill."""


def require_fits(plan: RestorePlan, fits: Iterable[Sequence[Any]], strict: bool, after: bool = False) -> None:
    """Raise StateMismatch if a plan is refused, if it does not refill what was overwritten, or if anything does not fit
    and `strict` is set. Every rank gets the same error, with the table of its own plan, whose `unexpected` are those
    that no rank requested.

    fits: of all ranks. after: modules with own code for that have loaded their values: only then is known what does
    not fit.
    """
    found = [RestoreFit(*each) for each in fits]
    plan.unexpected = sorted(set[str].intersection(*(set(each.unexpected) for each in found)))
    for each in found:
        if strict:
            _require_all(each, plan, _CHANGED if after else "nothing was changed")
        if each.refused is not None:
            raise StateMismatch(*each.refused)
        if each.left:
            raise StateMismatch(f"the checkpoint does not have {each.left}")


def _require_all(found: RestoreFit, plan: RestorePlan, outcome: str) -> None:
    problems = [
        f"{what} {names}"
        for what, names in (
            ("not in the checkpoint:", found.missing),
            ("only in the checkpoint:", _names(plan.unexpected)),
            ("different:", found.mismatched),
        )
        if names
    ]
    if problems:
        raise StateMismatch(
            f"the checkpoint does not fit: {'; '.join(problems)}",
            f"It holds {found.items}. Build the objects as they were saved, or pass strict=False to restore what fits; "
            f"{outcome}\n{plan.differences.text(_SHOWN)}",
        )


def _names(found: Sequence[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


Items = Mapping[str, JSON]


class RankState(Value):
    """The saved state that one rank restores."""

    items: dict[str, JSON] = {}
    redistributed: dict[str, list[JSON]] = {}
    """The states of all saved ranks, for objects that redistribute them."""
    seed: int | None = None
    """Seed of the random numbers, if they are derived."""
    notes: tuple[str, ...] = ()
    """Messages for the user."""


def share_out(
    saved: Sequence[Items], rank: int, world_size: int, objects: Mapping[str, Any], strict: bool
) -> RankState:
    """The state that `rank` of `world_size` restores from the items of another number of saved ranks. Pure.

    An item that was equal on all saved ranks goes to every rank. RNG state that differed, or that a single rank saved:
    a rank that existed at the save keeps its own, and an additional rank derives a seed from a saved one. An object
    that can take the states of all ranks (`load_state_dicts`), such as a data loader, redistributes them. Anything else
    is refused, or with strict=False taken from rank (own rank modulo saved ranks).

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
        elif hasattr(objects.get(item), "load_state_dicts") and all(item in other for other in saved):
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
    seed = None
    if RNG in own and RNG not in chosen:
        seed = xxhash.xxh3_64_intdigest(msgspec.json.encode([own[RNG], rank, world_size]))
    return RankState(chosen, redistributed, seed, _notes(saved, world_size, redistributed, different))


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
