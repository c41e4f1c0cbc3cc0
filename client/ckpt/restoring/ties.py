"""Tied parameters: one tensor under several names, of which an optimizer knows one. Pure.

Which one differs between layouts: a pipeline's last stage knows the embedding as its head, and has a copy of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

Ties = Mapping[str, frozenset[str]]
"""By name: all names of the same tensor."""


def ties(named: Iterable[tuple[str, Hashable]]) -> Ties:
    """Names that go with the same thing are tied."""
    names: dict[Hashable, set[str]] = defaultdict(set)
    for name, thing in named:
        names[thing].add(name)
    return {name: frozenset(tied) for tied in names.values() if len(tied) > 1 for name in tied}


def give_to_all(saved: Ties, states: dict[str, Any], groups: Iterable[dict[str, Any]]) -> None:
    """Have all names of a tied parameter known to the saved optimizer that knew one of them."""
    held = {name for group in groups for name in group["params"]}
    for group in groups:
        for name in list(group["params"]):
            for other in sorted(saved.get(name, frozenset()) - held):
                held.add(other)
                group["params"].append(other)
                if name in states:
                    states[other] = states[name]


def without_further_names(names: Iterable[str], live: Ties, known: Iterable[str]) -> list[str]:
    """The names that are not just another one of a live parameter that is known."""
    found = set(known)
    return sorted(name for name in names if not live.get(name, frozenset()) & found)
