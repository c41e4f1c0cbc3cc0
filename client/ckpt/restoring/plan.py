"""The plan of a restore: where the entries of a checkpoint go, and what does not fit.

Steps that must follow the placement of all bytes are collected in `finish`, to be run in order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """Different shape (left unchanged), different dtype (cast), or different optimizer class (loaded anyway)."""
    unused: list[str] = field(default_factory=list)
    """Items of the checkpoint that the caller did not request."""
    items: list[str] = field(default_factory=list)
    """All items of the checkpoint."""
    read: dict[str, int] = field(default_factory=dict)
    """Raw bytes that this rank has placed, by the name of the source."""
    overwritten: set[str] = field(default_factory=set)
    """Live state that is overwritten: tensors of modules, and items of optimizers that have state."""
    refused: StateMismatch | None = None
    """The reason why it cannot be restored, even with strict=False."""

    def has(self, trees: Mapping[str, JSON], item: str) -> bool:
        """Whether the checkpoint has an item that was requested; records it as missing otherwise."""
        if item not in trees:
            self.missing.append(item)
        return item in trees


def require_fit(plan: RestorePlan, strict: bool) -> None:
    """Raise StateMismatch if the plan is refused, or if anything does not fit and `strict` is set."""
    if strict:
        _require_all(plan)
    if plan.refused is not None:
        raise plan.refused


def require_refilled(plan: RestorePlan, overwritten: Collection[str]) -> None:
    """Raise StateMismatch if the plan does not refill state that an earlier, failed plan overwrote."""
    if left := sorted(set(overwritten) - plan.overwritten - set(plan.items)):
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise StateMismatch(f"the checkpoint does not have {', '.join(left[:_SHOWN])}{more}")


def _require_all(plan: RestorePlan) -> None:
    problems = [
        f"{what} {', '.join(found[:_SHOWN])}" + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        for what, found in (
            ("not in the checkpoint:", plan.missing),
            ("only in the checkpoint:", plan.unexpected),
            ("different:", plan.mismatched),
        )
        if found
    ]
    if problems:
        raise StateMismatch(
            f"the checkpoint does not fit: {'; '.join(problems)}",
            f"It holds {', '.join(plan.items)}. Build the objects as they were saved, or pass strict=False to "
            "restore what fits; nothing was changed",
        )
