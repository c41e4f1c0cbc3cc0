"""The chart of `plan`: the effective training time ratio over the interval."""

from __future__ import annotations

from math import isfinite, log10

from ckptplan.failures import ettr
from ckptplan.plan import Plan
from ckptstore import human
from ckptstore.charts import Point, Tick, plot, svg
from ckptstore.errors import InvalidRequest

_POINTS = 200
_SPREAD = 5.0
"""The curve extends from the shortest interval divided by this to the longest one times this."""
_TICKS_S = (0.1, 0.5, 2, 10, 30, 120, 600, 1800, 7200, 28_800, 86_400)


def draw(plan: Plan) -> str:
    """The SVG. Raises InvalidRequest for a plan without failures or without an interval."""
    found = plan.interval
    if found.mtbf_s is None or found.chosen_s is None:
        raise InvalidRequest(
            "there is nothing to plot without failures and an interval",
            "Give --mtbf, --failure-rate or --failures, and --interval if saves cost nothing",
        )
    mtbf_s, durable_s = found.mtbf_s, found.durable_s or 0.0

    def at(seconds: float, title: str = "") -> Point:
        return Point(log10(seconds), ettr(seconds, found.cost_s, mtbf_s, found.restart_s, durable_s), title)

    known = [("Young", found.young_s), ("Daly", found.daly_s), ("ETTR", found.ettr_s), ("interval", found.chosen_s)]
    marks = _merged([(name, value) for name, value in known if value and isfinite(value)])
    low, high = marks[0][1] / _SPREAD, marks[-1][1] * _SPREAD
    curve = [at(low * (high / low) ** (i / _POINTS)) for i in range(_POINTS + 1)]
    names = [f"{name}: {human.duration(value)}" for name, value in marks]
    lines = [curve, *([at(value, name)] for name, (_, value) in zip(names, marks, strict=True))]
    ticks = [Tick(log10(seconds), _short(seconds)) for seconds in _TICKS_S if low <= seconds <= high]
    drawn = plot(lines, lambda ratio: f"{100 * ratio:.4g} %", width=720, height=380, x_ticks=ticks)
    best = f"{found.ettr:.2%}" if found.ettr is not None else ""
    title = f"Effective training time {best} with a save every {human.duration(found.chosen_s)}"
    return svg(title, drawn, ["by interval between saves", *names], [_assumptions(plan)])


def _merged(marks: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Marks by interval, with those that are within 3 % of each other in one."""
    found: list[tuple[str, float]] = []
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if found and value <= 1.03 * found[-1][1]:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, value))
    return found


def _assumptions(plan: Plan) -> str:
    found = plan.interval
    durable = "" if found.durable_s is None else f", durable after {human.duration(found.durable_s)}"
    cost = f"a save costs {found.cost_s:.3g} s{durable}, restart {human.duration(found.restart_s)}"
    return f"{plan.model.source}: failures every {human.duration(found.mtbf_s or 0.0)}, {cost}"


def _short(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
