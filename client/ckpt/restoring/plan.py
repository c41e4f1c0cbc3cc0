"""The plan of a restore: where the entries of a checkpoint go, and what does not fit.

Steps that must follow the placement of all bytes are collected in `finish`, to be run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt.restoring.host_destinations import HostDestinations
from ckptstore.errors import StateMismatch
from ckptstore.format.documents import JSON

_SHOWN = 8


@dataclass(slots=True)
class RestorePlan:
    """Destinations of the entries, differences from the live objects, and the final steps."""

    destinations: HostDestinations
    finish: list[Callable[[], object]] = field(default_factory=list)
    restore_rng: Callable[[], None] | None = None
    """Puts the saved random state back, after all of `finish`; None if the checkpoint has none for this rank."""
    values: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    """Requested, but not in the checkpoint."""
    unexpected: list[str] = field(default_factory=list)
    """In a requested item of the checkpoint, but without a destination on this rank."""
    mismatched: list[str] = field(default_factory=list)
    """Different shape (left unchanged, without optimizer state), different dtype (cast), or different optimizer class
    (loaded anyway)."""
    unused: list[str] = field(default_factory=list)
    """Items of the checkpoint that the caller did not request."""
    items: list[str] = field(default_factory=list)
    """All items of the checkpoint."""
    read: dict[str, int] = field(default_factory=dict)
    """Raw bytes that this rank has placed, by the name of the source."""
    resized: set[int] = field(default_factory=set)
    """Ids of the live tensors whose shape differs."""
    overwritten: set[str] = field(default_factory=set)
    """Live state that is overwritten: tensors of modules, and items of optimizers that have state."""
    refused: StateMismatch | None = None
    """The reason why it cannot be restored, even with strict=False."""

    def has(self, trees: Mapping[str, JSON], item: str) -> bool:
        """Whether the checkpoint has an item that was requested; records it as missing otherwise."""
        if item not in trees:
            self.missing.append(item)
        return item in trees


class Fit(NamedTuple):
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


def fit(plan: RestorePlan, overwritten: Collection[str]) -> Fit:
    """overwritten: what earlier plans that failed have overwritten on this rank."""
    left = sorted(set(overwritten) - plan.overwritten - set(plan.items))
    refused = None if plan.refused is None else (plan.refused.message, plan.refused.hint)
    return Fit(
        plan.unexpected, _names(plan.missing), _names(plan.mismatched), ", ".join(plan.items), refused, _names(left)
    )


def require_fits(fits: Iterable[Sequence[Any]], strict: bool) -> list[str]:
    """What no rank has a destination for. fits: of all ranks. Equal on all ranks, and so is the error.

    Raises StateMismatch if a plan is refused, if it does not refill what was overwritten, or if anything does not fit
    and `strict` is set.
    """
    found = [Fit(*each) for each in fits]
    unexpected = sorted(set[str].intersection(*(set(each.unexpected) for each in found)))
    for each in found:
        if strict:
            _require_all(each, unexpected)
        if each.refused is not None:
            raise StateMismatch(*each.refused)
        if each.left:
            raise StateMismatch(f"the checkpoint does not have {each.left}")
    return unexpected


def _require_all(found: Fit, unexpected: Sequence[str]) -> None:
    problems = [
        f"{what} {names}"
        for what, names in (
            ("not in the checkpoint:", found.missing),
            ("only in the checkpoint:", _names(unexpected)),
            ("different:", found.mismatched),
        )
        if names
    ]
    if problems:
        raise StateMismatch(
            f"the checkpoint does not fit: {'; '.join(problems)}",
            f"It holds {found.items}. Build the objects as they were saved, or pass strict=False to restore what fits; "
            "nothing was changed",
        )


def _names(found: Sequence[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
