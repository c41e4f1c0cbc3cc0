"""The plan of a restore: where the entries of a checkpoint go, what does not fit, and who restores state of a rank.

Steps that must follow the placement of all bytes are collected in `finish`, to be run in order.

Surgery is a restore into objects that differ from those that were saved, with a table of what did not match. It changes
no live object and reads no entry. Names are matched before anything is planned, so that modules, optimizer state,
parameter groups and gradients follow the same names. Each rank matches for itself; what only one side has is judged
when the ranks have exchanged their fits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product, starmap, takewhile
from operator import add, eq, le
from typing import Any, NamedTuple

import msgspec
import xxhash

from ckpt.capture.train_state import MODEL, RESERVED, RNG, TrainState
from ckpt.lazily import is_tensor
from ckpt.restoring.host_destinations import HostDestinations
from ckptstore import human
from ckptstore.errors import InvalidRequest, StateMismatch
from ckptstore.format.documents import JSON
from ckptstore.format.trees import entry_of
from ckptstore.values import Value

Globs = str | Iterable[str] | Mapping[str, bool]
"""A pattern of names, or several; of a mapping those that are true."""
Cast = bool | Mapping[str, Callable[[Any], Any]]
"""Whether types are converted; or the functions that make the tensor subclasses here of plain tensors, by pattern."""
Shape = tuple[int, ...]
_WRAPPER = re.compile(
    r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module|base_model\.model)\."
)
"""The parts of names that wrappers add."""
_TRIED = 64
"""Names of each side that are compared with each other to suggest a rename."""


class Matching(NamedTuple):
    """The effect of a surgery on one checkpoint and the objects of this rank, by the names that optimizer state has."""

    names: dict[str, str | None]
    """By name in the checkpoint: the name here, if it is another one; None: left out."""
    left: set[str]
    """The names here that are left out; also as ITEM/NAME."""
    grown: dict[str, Shape]
    """The shapes of smaller tensors, by the names of those here that receive them; also by ITEM/NAME."""


@dataclass(frozen=True, slots=True)
class Surgery:
    """Requests of the caller. Patterns are of ITEM/NAME, with or without what wrappers add."""

    rename: Mapping[str, str] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    grow: tuple[str, ...] = ()
    cast: Cast = False

    @staticmethod
    def of(rename: Mapping[str, str] | None, only: Globs, skip: Globs, grow: Globs, cast: Cast) -> Surgery:
        """Patterns without an item are of every module. Raises InvalidRequest."""
        rules = dict[str, str]()
        for old, new in (rename or {}).items():
            before, after = _of_item(old), _of_item(new)
            if before.count("*") != after.count("*"):
                raise InvalidRequest(f"{old!r} and {new!r} differ in the number of * or in the item", "Use as many")
            rules[before] = after
        return Surgery(rules, _globs(only), _globs(skip), _globs(grow), cast)

    def make(self, item: str, name: str) -> Any:
        """The function of `cast` for a name here. A pattern that matches nothing is not refused: a stage has only some
        of the objects, and a tensor that no function makes is a mismatch."""
        made = self.cast if isinstance(self.cast, Mapping) else {}
        return next((make for one, make in made.items() if _any(_globs(one), _paths(item, [name]))), None)

    def match(
        self, saved: Mapping[str, Mapping[str, JSON]], state: TrainState, saved_as: Callable[[JSON], tuple[str, Shape]]
    ) -> Matching:
        """saved: what the checkpoint has of each module item. saved_as: see RestorePlan. Raises InvalidRequest."""
        matching, before, after = Matching({}, set(), {}), list[str](), list[str]()
        for item, trees in saved.items():
            here, prefix = {leaf.name: leaf for leaf in state.leaves(item)}, state.prefix(item)
            names = self._names(item, trees, here)
            known = {new: trees[old] for old, new in names.items()}
            for group in _tied({**known, **here}) if self.only or self.skip or self.grow else ():
                every = [each for name in group for each in (f"{item}/{name}", prefix + name)]
                paths = _paths(item, group)
                after += paths
                if (self.only and not _any(self.only, paths)) or _any(self.skip, paths):
                    matching.left.update(every)
                elif _any(self.grow, paths) and group[0] in known and (leaf := here.get(group[0])):
                    _, shape = saved_as(known[group[0]])
                    if is_tensor(leaf.value) and _is_smaller(shape, leaf.part.shape):
                        matching.grown.update(dict.fromkeys(every, shape))
            before += _paths(item, trees) if self.rename else []
            for old, new in names.items():
                if prefix + new in matching.left:
                    matching.names[prefix + old] = None
                elif new != old:
                    matching.names[prefix + old] = prefix + new
        for patterns, paths in ((self.rename, before), ((*self.only, *self.skip, *self.grow), after)):
            _check(patterns, paths)
        return matching

    def _names(self, item: str, saved: Iterable[str], here: Iterable[str]) -> dict[str, str]:
        """The name here of each saved one, by the renames; without what wrappers add, where that leaves one of each."""
        names, rules, used = {name: name for name in saved}, list(starmap(_rule, self.rename.items())), dict[str, str]()
        for name in names if rules else ():
            path, *bare = _paths(item, [name])
            path = next((found for rule in rules for one in (path, *bare) if (found := rule(one)) is not None), path)
            names[name] = new = path.removeprefix(f"{item}/")
            if (other := used.setdefault(new, name)) != name:
                raise InvalidRequest(f"{other!r} and {name!r} would both be {path}", "Rename only one of them")
        new_names = set(names.values())
        if lost := new_names.difference(here):
            there, free = _bare(lost), _bare(set(here) - new_names)
            pairs = {one[0]: free[bare][0] for bare, one in there.items() if len(one) == len(free[bare]) == 1}
            names = {name: pairs.get(new, new) for name, new in names.items()}
        return names


NO_SURGERY = Surgery()


class Difference(NamedTuple):
    """One row of the table. An empty text: there is nothing of that."""

    name: str
    here: str
    there: str
    why: str
    rename: str = ""
    """The rename that would make it fit."""


class Differences(list[Difference]):
    """The differences of a checkpoint and the objects of this rank. Notebooks show a table."""

    def text(self, most: int) -> str:
        """The table, with at most so many rows."""
        table = [Difference._fields, *self[:most]]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        return "\n".join(lines + [f"and {len(self) - most} more"] * (len(self) > most))

    def __str__(self) -> str:
        return self.text(len(self))

    def _repr_html_(self) -> str:
        return human.html_table([Difference._fields, *self])


def suggested(rows: Iterable[Difference]) -> Differences:
    """The table with renames: for names on one side only that have one shape, and differ in one part or in how they
    begin. The rename that explains most comes first."""
    table = Differences(rows)
    there, here = ([row for row in table if row[1 + i] and not row[2 - i]] for i in (1, 0))
    pairs = defaultdict[str, list[set[Difference]]](list)
    for old, new in product(there[:_TRIED], here[:_TRIED]):
        if old.there == new.here and (rule := _rule_between(old.name, new.name)):
            pairs[rule].append({old, new})
    renames: dict[Difference, str] = {}
    for rule in sorted(pairs, key=lambda one: -len(pairs[one])):
        for pair in pairs[rule]:
            if renames.keys().isdisjoint(pair):
                renames |= dict.fromkeys(pair, rule)
    return Differences(row._replace(rename=renames.get(row, "")) for row in table)


def _globs(given: Globs) -> tuple[str, ...]:
    if isinstance(given, str):
        return (_of_item(given),)
    return tuple(_of_item(name) for name in given if not isinstance(given, Mapping) or given[name])


def _of_item(pattern: str) -> str:
    return pattern if "/" in pattern else f"*/{pattern}"


def _paths(item: str, names: Iterable[str]) -> list[str]:
    """ITEM/NAME of each, also without what wrappers add."""
    return [f"{item}/{one}" for name in names for one in dict.fromkeys((name, _WRAPPER.sub("", name)))]


def _any(patterns: Iterable[str], paths: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns for path in paths)


def _tied(values: Mapping[str, Any]) -> Iterable[list[str]]:
    """The names of each live tensor, and each other name."""
    tied = defaultdict[object, list[str]](list)
    for name, one in values.items():
        live = getattr(one, "value", None)
        tied[id(live) if is_tensor(live) else name].append(name)
    return tied.values()


def _is_smaller(small: Shape, large: Shape) -> bool:
    return small != large and len(small) == len(large) and all(map(le, small, large))


def _check(patterns: Iterable[str], paths: Sequence[str]) -> None:
    """Raise InvalidRequest for a pattern that matches nothing."""
    for pattern in patterns:
        if not _any((pattern,), paths):
            parts = {part for path in paths for part in path.partition("/")[2].split(".")}
            near = get_close_matches(pattern.rpartition("/")[2].strip("*."), sorted(parts), 3)
            raise InvalidRequest(
                f"no name matches {pattern.removeprefix('*/')!r}",
                f'Similar: {", ".join(near) or "none"}. strict="report" shows what does not match; nothing was changed',
            )


def _rule(pattern: str, target: str) -> Callable[[str], str | None]:
    """The new path for one that matches the pattern, else None."""
    matcher, parts = re.compile("(.*)".join(map(re.escape, pattern.split("*")))), target.split("*")

    def rename(path: str) -> str | None:
        found = matcher.fullmatch(path)
        return found and "".join(map(add, parts, (*found.groups(), "")))

    return rename


def _bare(names: Iterable[str]) -> defaultdict[str, list[str]]:
    """The names by the part of them that wrappers did not add."""
    found = defaultdict[str, list[str]](list)
    for name in names:
        found[_WRAPPER.sub("", name)].append(name)
    return found


def _rule_between(old: str, new: str) -> str:
    """The rename between two paths that differ in one part only, or in what begins them; nothing for others."""
    (item, _, first), (other, _, second) = old.partition("/"), new.partition("/")
    a, b = first.split("."), second.split(".")
    end = _common(a[::-1], b[::-1])
    begin = _common(a[: len(a) - end], b[: len(b) - end])
    if item != other or not begin + end:
        return ""
    of_item = "" if item == MODEL else f"{item}/"
    head, tail = ["*" if part.isdigit() else part for part in a[:begin]], ["*"] * (end > 0)
    return ": ".join(repr(of_item + ".".join(head + one[begin : len(one) - end] + tail)) for one in (a, b))


def _common(first: list[str], second: list[str]) -> int:
    """How many elements both begin with."""
    return sum(takewhile(bool, map(eq, first, second)))


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

    def fit(self, overwritten: set[str]) -> RestoreFit:
        """overwritten: what earlier plans that failed have overwritten on this rank."""
        return RestoreFit(
            self.unexpected,
            _names(self.missing),
            _names(self.mismatched),
            ", ".join(self.items),
            None if self.refused is None else self.refused.args,
            _names(sorted(overwritten.difference(self.overwritten, self.items))),
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
    found = list(starmap(RestoreFit, fits))
    plan.unexpected = sorted(set[str].intersection(*(set(each.unexpected) for each in found)))
    for each in found:
        names_of = {
            "not in the checkpoint": each.missing,
            "only in the checkpoint": _names(plan.unexpected),
            "different": each.mismatched,
        }
        problems = "; ".join(f"{what}: {names}" for what, names in names_of.items() if names)
        if strict and problems:
            raise StateMismatch(
                f"the checkpoint does not fit: {problems}",
                f"It holds {each.items}. Build the objects as they were saved, or pass strict=False to restore what "
                f"fits; {_CHANGED if after else 'nothing was changed'}\n{plan.differences.text(_SHOWN)}",
            )
        if each.refused is not None:
            raise StateMismatch(*each.refused)
        if each.left:
            raise StateMismatch(f"the checkpoint does not have {each.left}")


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
