"""Line charts: numbers to points and ticks in SVG units, for the pages of the daemon, and whole SVG files. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from math import floor, isfinite, log2, log10
from typing import NamedTuple

from ckptstore import human

_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")
_MAX_MARKS = 300
_EDGE = 4.0
_FARTHEST = 1e300
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_AGES = (
    *(_MINUTE * n for n in (1, 5, 10, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 91, 182, 365)),
)
"""Distances between the ticks of an axis of ages."""
_LEGEND = 330
_COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#9333ea", "#b45309", "#475569")
_STYLE = (
    "text{font:12px sans-serif;fill:#334155}.grid{stroke:#cbd5e1;stroke-width:1}svg{background:#fff}"
    "@media(prefers-color-scheme: dark){svg{background:#0f172a}text{fill:#cbd5e1}.grid{stroke:#334155}}"
)


class Point(NamedTuple):
    """One value of a chart, or the dot that shows it."""

    x: float
    y: float
    title: str
    kind: str = ""
    """Selects the color."""
    link: str = ""
    """The page about it."""
    on_line: bool = True
    """Whether the line goes through it."""


class Tick(NamedTuple):
    """A tick of an axis."""

    at: float
    label: str


class Line(NamedTuple):
    """A line, and its dots."""

    points: str
    """The points of the polyline."""
    area: str
    """The polygon between the line and the axis; empty without a line."""
    marks: tuple[Point, ...] = ()
    smooth: str = ""
    """The points of the smoothed polyline."""


class Plot(NamedTuple):
    """Lines with two axes."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    """The last four: edges of the plot area."""
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


def compact(number: float) -> str:
    """A number in few characters: 1.2k, 3.5M, 1.2e-05."""
    size = abs(number)
    if not isfinite(number) or (size and size < 1e-3) or size >= 1e21:
        return f"{number:.3g}"
    if size < 1000:
        return f"{number:.4g}"
    power = min(len(_SUFFIXES) - 1, floor(log10(size)) // 3)
    return f"{number / 1000**power:.4g}{_SUFFIXES[power]}"


def sparkline(values: Iterable[float], width: int = 120, height: int = 24) -> Line | None:
    """A line of the finite values; None if there are fewer than two."""
    known = [value for value in values if isfinite(value)]
    if len(known) < 2:
        return None
    across, up = _scale((0, len(known) - 1), 2, width - 2), _scale(known, height - 2, 2)
    places = [(across(i), up(value)) for i, value in enumerate(known)]
    return Line(_polyline(places), _area(places, height))


def plot(
    lines: Sequence[Sequence[Point]],
    write: Callable[[float], str] = compact,
    width: int = 1088,
    height: int = 300,
    log: bool = False,
    ages: bool = False,
    from_zero: bool = False,
    smooth: float = 0.0,
    x_ticks: Sequence[Tick] = (),
) -> Plot:
    """A plot of the finite points, by ascending x. Very many points are thinned out evenly; the first and last stay.

    write: formats a y value for its axis; ticks of sizes are round in a binary unit. log: a logarithmic y axis; values
    that are not positive are left out. ages: x is in seconds before now, as a negative number. from_zero: the y axis
    begins at 0 at the latest. smooth: the weight of earlier points in each smoothed line, below 1. x_ticks: ticks at
    these values of x instead of computed ones.
    """
    known = [_known(line, log) for line in lines]
    xs, ys = [p.x for line in known for p in line], [p.y for line in known for p in line]
    if from_zero and ys:
        ys += [0.0] if any(ys) else [0.0, 1.0]
    left, right, top, bottom = 74, width - 16, 12, height - 30
    across, up = _scale(xs, left + _EDGE, right - _EDGE), _scale(ys, bottom - _EDGE, top + _EDGE)
    unit = 1024.0 ** (log2(max(1.0, *ys)) // 10) if write is human.size and not log else 1.0
    written = (lambda value: write(10.0**value)) if log else write

    def line(found: Sequence[Point]) -> Line:
        marks = tuple(p._replace(x=across(p.x), y=up(p.y)) for p in found)
        places = [(mark.x, mark.y) for mark in marks if mark.on_line]
        area = _area(places, bottom) if from_zero else ""
        return Line(_polyline(places), area, marks, _polyline(_smoothed(places, smooth)))

    if not x_ticks:
        values = _ticks(xs, 6, _round_ages if ages else _round_numbers)
        x_ticks = [Tick(value, _age(value) if ages else compact(value)) for value in values]
    heights = _ticks([y / unit for y in ys], 4, _round_exponents if log else _round_numbers)
    return Plot(
        width, height, left, right, top, bottom, tuple(map(line, known)),
        tuple(Tick(across(tick.at), tick.label) for tick in x_ticks),
        tuple(Tick(up(value * unit), written(value * unit)) for value in heights),
    )  # fmt: skip


def svg(title: str, drawn: Plot, names: Sequence[str], notes: Sequence[str] = ()) -> str:
    """A plot as an SVG file for light and dark pages, with its title, a legend and notes below it.

    names: one per line. Marks with a title are dots that show it.
    """
    return "\n".join(_svg_lines(title, drawn, names, notes)) + "\n"


def _svg_lines(title: str, drawn: Plot, names: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    width, height = drawn.width + _LEGEND, drawn.height + 40 + 18 * len(notes)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -30 {width} {height}" role="img">'
    yield f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    yield f'<text x="{drawn.left}" y="-10">{escape(title)}</text>'
    for tick in drawn.y_ticks:
        yield f'<line class="grid" x1="{drawn.left}" x2="{drawn.right}" y1="{tick.at}" y2="{tick.at}"/>'
        yield f'<text x="{drawn.left - 8}" y="{tick.at + 4}" text-anchor="end">{escape(tick.label)}</text>'
    for tick in drawn.x_ticks:
        yield f'<line class="grid" x1="{tick.at}" x2="{tick.at}" y1="{drawn.bottom}" y2="{drawn.bottom + 5}"/>'
        yield f'<text x="{tick.at}" y="{drawn.bottom + 20}" text-anchor="middle">{escape(tick.label)}</text>'
    for number, (name, line) in enumerate(zip(names, drawn.lines, strict=True)):
        color, at = _COLORS[number % len(_COLORS)], drawn.top + 18 * number
        yield f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{line.points}"/>'
        for mark in (mark for mark in line.marks if mark.title):
            dot = f'<circle cx="{mark.x}" cy="{mark.y}" r="4" fill="{color}">'
            yield f"{dot}<title>{escape(mark.title)}</title></circle>"
        yield f'<rect x="{drawn.width}" y="{at}" width="10" height="10" fill="{color}"/>'
        shown = name if len(name) <= 44 else f"…{name[-43:]}"
        yield f'<text x="{drawn.width + 16}" y="{at + 9}">{escape(shown)}</text>'
    for number, note in enumerate(notes):
        yield f'<text x="{drawn.left}" y="{drawn.height + 18 * number}">{escape(note)}</text>'
    yield "</svg>"


def step_axis(steps: Sequence[int], left: float, right: float) -> tuple[Callable[[float], float], tuple[Tick, ...]]:
    """The place of a step between two edges, and the ticks."""
    across = _scale(steps, left + _EDGE, right - _EDGE)
    return across, tuple(Tick(across(value), compact(value)) for value in _ticks(steps, 6, _round_numbers))


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    """The place of a value between the edges of the lowest and the highest value."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = 0.0 if low < high else abs(low) / 10 or 1.0
    low, high = (low - margin) / 2, (high + margin) / 2  # halved, because a difference can overflow
    span = high - low
    return lambda value: round(begin + (end - begin) * ((value / 2 - low) / span if span > 0 else 0.5), 1)


def _polyline(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _smoothed(places: Iterable[tuple[float, float]], weight: float) -> Iterator[tuple[float, float]]:
    """The means of all points so far, weighted by powers of `weight`: each of these sums has its own total weight."""
    total = weights = 0.0
    for x, y in places:
        total, weights = weight * total + y, weight * weights + 1
        yield x, round(total / weights, 1)


def _area(places: Sequence[tuple[float, float]], bottom: float) -> str:
    if not places:
        return ""
    return _polyline([(places[0][0], bottom), *places, (places[-1][0], bottom)])


def _known(points: Iterable[Point], log: bool) -> list[Point]:
    """The points that can be drawn, by ascending x; thinned out evenly if there are very many."""
    finite = (p for p in points if isfinite(p.x) and isfinite(p.y) and (p.y > 0 or not log))
    drawable = (p._replace(x=_drawable(p.x), y=log10(y) if log else y) for p in finite for y in [_drawable(p.y)])
    found = sorted(drawable, key=lambda p: p.x)
    if len(found) <= _MAX_MARKS:
        return found
    return [found[round(i * (len(found) - 1) / (_MAX_MARKS - 1))] for i in range(_MAX_MARKS)]


def _drawable(value: float) -> float:
    """The value, clamped so that differences stay finite."""
    return max(-_FARTHEST, min(_FARTHEST, value))


def _ticks(values: Sequence[float], count: int, between: Callable[[float, float, int], list[float]]) -> list[float]:
    """The ticks for an axis of these values. between: finds those between two values."""
    if not values or min(values) == max(values):
        return list(values[:1])
    found = between(min(values), max(values), count)
    whole = between is _round_numbers and all(value.is_integer() for value in map(float, values))
    return [value for value in found if not whole or value.is_integer()]


def _round_exponents(low: float, high: float, count: int) -> list[float]:
    """The ticks for a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone. All as exponents."""
    powers = range(floor(low), floor(high) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [at for power in powers for factor in factors if low <= (at := power + log10(factor)) <= high]
        if 2 <= len(found) <= 2 * count:
            return found
    return found[:: -(-len(found) // (2 * count))] if len(found) > 1 else [low, high]


def _round_ages(low: float, high: float, count: int) -> list[float]:
    """The ticks for an axis of seconds before now: whole minutes, hours or days."""
    step = next((step for step in _AGES if (high - low) / step <= count), (high - low) / count)
    first = -(-low // step)
    return [at * step for at in range(int(first), int(high // step) + 1)] or [low, high]


def _age(seconds: float) -> str:
    whole = human.age(-seconds).removesuffix(" 00m").removesuffix(" 00h")
    return f"{whole} ago" if seconds else "now"


def _round_numbers(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers between two others."""
    rough = (high / 2 - low / 2) / count * 2
    if not isfinite(rough) or rough < 1e-300 or rough > 1e300:
        return [low, high]
    power: float = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = -(-low // step)
    found: list[float] = []
    while (value := first * step) <= high and len(found) < 3 * count:
        found.append(value or 0.0)  # not -0.0
        if first + 1 == first:
            break
        first += 1
    return found or [low, high]
