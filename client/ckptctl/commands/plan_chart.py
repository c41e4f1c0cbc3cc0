"""The chart of `plan`: the effective training time ratio over the interval, as SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import isfinite, log

from ckptplan.failures import ettr
from ckptplan.plan import Interval, Plan
from ckptstore import human
from ckptstore.errors import InvalidRequest

_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 64, 56
_LABEL = 230
"""Width of the longest label of a mark."""
_POINTS = 200
_SPREAD = 5.0
"""The curve extends from the shortest interval divided by this to the longest one times this."""
_TICKS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 28_800, 86_400)
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.label { paint-order: stroke; stroke: #ffffff; stroke-width: 5px; stroke-linejoin: round; }
.title { font-size: 15px; font-weight: 600; }
.small { font-size: 12px; fill: #57606a; }
.axis { stroke: #8c959f; } .grid { stroke: #d0d7de; } .background { fill: #ffffff; }
.curve { fill: none; stroke: #0969da; stroke-width: 2; }
.mark { stroke-width: 1.5; stroke-dasharray: 4 3; stroke: #57606a; } .dot { fill: #57606a; }
.chosen { stroke: #bc4c00; stroke-width: 2; } .chosen-dot { fill: #bc4c00; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .label { stroke: #0d1117; } .small { fill: #9198a1; } .background { fill: #0d1117; }
  .axis { stroke: #656c76; } .grid { stroke: #2a313c; } .curve { stroke: #4493f8; }
  .mark { stroke: #9198a1; } .dot { fill: #9198a1; } .chosen { stroke: #f0883e; } .chosen-dot { fill: #f0883e; }
}
"""


def draw(plan: Plan) -> str:
    """The SVG. Raises InvalidRequest for a plan without failures or without an interval."""
    found = plan.interval
    if found.mtbf_s is None or found.chosen_s is None:
        raise InvalidRequest(
            "there is nothing to plot without failures and an interval",
            "Give --mtbf, --failure-rate or --failures, and --interval if saves cost nothing",
        )
    marks = [("Young", found.young_s), ("Daly", found.daly_s), ("ETTR", found.ettr_s), ("interval", found.chosen_s)]
    shown = [(name, value) for name, value in marks if value and isfinite(value)]
    scale = _Scale(found, [value for _, value in shown])
    return "\n".join(_lines(plan, scale, _merged(shown)))


def _merged(marks: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Marks by interval, with those that are within 3 % of each other in one."""
    found: list[tuple[str, float]] = []
    for name, value in sorted(marks, key=lambda mark: mark[1]):
        if found and value <= 1.03 * found[-1][1]:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, value))
    return found


class _Scale:
    """Places of intervals (logarithmic) and ratios on the chart."""

    def __init__(self, interval: Interval, marks: list[float]) -> None:
        self._interval = interval
        self.low, self.high = min(marks) / _SPREAD, max(marks) * _SPREAD
        step = (self.high / self.low) ** (1 / _POINTS)
        self.curve = [(self.low * step**i, self.ratio(self.low * step**i)) for i in range(_POINTS + 1)]
        top = max(ratio for _, ratio in self.curve)
        bottom = min(ratio for _, ratio in self.curve)
        self.tick = next((step for step in _STEPS if (top - bottom) / step <= 6), _STEPS[-1])
        self.bottom = max(0.0, self.tick * (bottom // self.tick))
        self.top = min(1.0, self.tick * (top // self.tick + 1))

    def ratio(self, seconds: float) -> float:
        """ETTR at an interval."""
        of = self._interval
        return ettr(seconds, of.cost_s, of.mtbf_s or 1.0, of.restart_s, of.durable_s or 0.0)

    def x(self, seconds: float) -> float:
        """In SVG units."""
        share = log(seconds / self.low) / log(self.high / self.low)
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, ratio: float) -> float:
        """In SVG units."""
        share = (ratio - self.bottom) / (self.top - self.bottom)
        return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _lines(plan: Plan, scale: _Scale, marks: list[tuple[str, float]]) -> Iterator[str]:
    found = plan.interval
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    yield f"<style>{_STYLE}</style>"
    yield f'<rect class="background" width="{_WIDTH}" height="{_HEIGHT}"/>'
    best = f"{found.ettr:.2%}" if found.ettr is not None else ""
    title = f"Effective training time {best} with a save every {human.duration(found.chosen_s or 0.0)}"
    yield f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>'
    yield f'<text class="small" x="{_LEFT}" y="43">{escape(_subtitle(plan))}</text>'
    yield from _axes(scale)
    points = " ".join(f"{scale.x(seconds)},{scale.y(ratio)}" for seconds, ratio in scale.curve)
    yield f'<polyline class="curve" points="{points}"/>'
    places = [scale.x(value) for _, value in marks]
    for name, value in marks:
        yield from _mark(scale, name, value)
    for number, (name, value) in enumerate(marks):  # above all lines
        crowded = number + 1 < len(places) and places[number + 1] - places[number] < _LABEL
        yield _label(name, value, places[number], number, to_left=crowded or places[number] > _WIDTH - _LABEL)
    yield "</svg>"


def _subtitle(plan: Plan) -> str:
    found = plan.interval
    durable = "" if found.durable_s is None else f", durable after {human.duration(found.durable_s)}"
    cost = f"a save costs {found.cost_s:.3g} s{durable}, restart {human.duration(found.restart_s)}"
    return f"{plan.model.source}: failures every {human.duration(found.mtbf_s or 0.0)}, {cost}"


def _axes(scale: _Scale) -> Iterator[str]:
    base, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    digits = 1 if scale.tick < 0.01 else 0
    count = round((scale.top - scale.bottom) / scale.tick)
    for number in range(count + 1):
        ratio = scale.bottom + number * scale.tick
        y = scale.y(ratio)
        yield f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
        yield f'<text class="small" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{ratio:.{digits}%}</text>'
    last = -100.0
    for seconds in _TICKS_S:
        if scale.low <= seconds <= scale.high and scale.x(seconds) - last >= 52:
            last = x = scale.x(seconds)
            yield f'<line class="axis" x1="{x}" x2="{x}" y1="{base}" y2="{base + 5}"/>'
            yield f'<text class="small" x="{x}" y="{base + 20}" text-anchor="middle">{_short(seconds)}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{base}" y2="{base}"/>'
    middle = (_LEFT + right) / 2
    yield f'<text class="small" x="{middle}" y="{base + 42}" text-anchor="middle">interval between saves</text>'


def _mark(scale: _Scale, name: str, seconds: float) -> Iterator[str]:
    x, y = scale.x(seconds), scale.y(scale.ratio(seconds))
    chosen = "interval" in name
    kind, dot = ("chosen", "chosen-dot") if chosen else ("mark", "dot")
    base = _HEIGHT - _BOTTOM
    yield f'<line class="{kind}" x1="{x}" x2="{x}" y1="{y}" y2="{base}"/>'
    yield f'<circle class="{dot}" cx="{x}" cy="{y}" r="4"/>'


def _label(name: str, seconds: float, x: float, number: int, to_left: bool) -> str:
    """The text of a mark; those of neighbours are on lines of their own."""
    y = _HEIGHT - _BOTTOM - 12 - 18 * (number % 4)
    anchor, shift = ("end", -6) if to_left else ("start", 6)
    text = escape(f"{name}: {human.duration(seconds)}")
    return f'<text class="label" x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _short(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
