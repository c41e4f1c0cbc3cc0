"""Surgery: a restore into objects that differ from those that were saved, and the table of what did not match.

Nothing here changes a live object or reads an entry. Names are matched before anything is planned, so that modules,
optimizer state, parameter groups and gradients follow the same names. Each rank matches for itself; what only one side
has is judged when the ranks have exchanged their fits.
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

from ckpt.capture.train_state import MODEL, TrainState
from ckpt.lazily import is_tensor
from ckptstore import human
from ckptstore.errors import InvalidRequest
from ckptstore.format.documents import JSON

Globs = str | Iterable[str] | Mapping[str, bool]
"""A pattern of names, or several; of a mapping those that are true."""
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
    cast: bool = False

    @staticmethod
    def of(rename: Mapping[str, str] | None, only: Globs, skip: Globs, grow: Globs, cast: bool) -> Surgery:
        """Patterns without an item are of every module. Raises InvalidRequest."""
        rules = {_of_item(old): _of_item(new) for old, new in (rename or {}).items()}
        for old, new in (rename or {}).items():
            if _of_item(old).count("*") != rules[_of_item(old)].count("*"):
                raise InvalidRequest(f"{old!r} and {new!r} differ in the number of * or in the item", "Use as many")
        return Surgery(rules, _globs(only), _globs(skip), _globs(grow), cast)

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
        if not any(fnmatchcase(path, pattern) for path in paths):
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
