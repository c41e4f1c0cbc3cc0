"""The result of a benchmark: a table for people, and a verdict for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Goal:
    """A measured ratio and its goal."""

    name: str
    """The contestant, such as "overlap"."""
    vs: str
    """Its reference, such as "memcpy"."""
    ratio: float
    goal: float
    direction: Literal["at most", "at least"]

    @property
    def ok(self) -> bool:
        """Whether the goal is reached; False for a ratio that could not be measured."""
        if math.isnan(self.ratio):
            return False
        return self.ratio <= self.goal if self.direction == "at most" else self.ratio >= self.goal

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {
            "name": self.name,
            "vs": self.vs,
            "ratio": _number(self.ratio),
            "goal": self.goal,
            "direction": self.direction,
            "ok": self.ok,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The first goal is the headline. All must be reached."""

    bench: str
    what: str
    """Subject, repetitions and machine."""
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Limit, peers, ours."""
    goals: Sequence[Goal]
    limit: float | None = None
    """The machine's limit, in the unit of `peers`."""
    peers: Mapping[str, float] = field(default_factory=dict)
    """Figures of the peers."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Peers that do not install or run, and why."""
    state_bytes: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers."""

    @property
    def ok(self) -> bool:
        """Whether all goals are reached."""
        return all(goal.ok for goal in self.goals)

    def verdict(self) -> dict[str, object]:
        """One JSON object."""
        headline = self.goals[0]
        return {
            "bench": self.bench,
            "ratio": _number(headline.ratio),
            "vs": headline.vs,
            "goal": headline.goal,
            "direction": headline.direction,
            "ok": self.ok,
            "limit": None if self.limit is None else _number(self.limit),
            "peers": {name: _number(value) for name, value in self.peers.items()},
            "problems": dict(self.problems),
            "state_bytes": self.state_bytes,
            "goals": [goal.document() for goal in self.goals],
            "facts": {name: _rounded(value) for name, value in self.facts.items()},
        }


def _rounded(value: Any) -> Any:
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    """Round to four significant digits, the precision of a measurement. JSON has no infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
