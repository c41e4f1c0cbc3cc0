"""What a benchmark found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """A table for people, and a verdict for machines: the ratio must not exceed the goal."""

    bench: str
    what: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    ratio: float
    goal: float
    also_ok: bool = True
    """Further conditions, shown in the table or in `facts`."""
    facts: dict[str, float] = field(default_factory=dict)

    def verdict(self) -> dict[str, object]:
        """One JSON object."""
        ok = self.ratio <= self.goal and self.also_ok
        return {"bench": self.bench, "ratio": round(self.ratio, 4), "goal": self.goal, "ok": ok, **self.facts}
