"""Chart geometry: numbers to points, bars and ticks, in SVG units. Pure; the templates draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor, isfinite, log10

from ckptstore import human

_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")
_MAX_MARKS = 300
_EDGE = 4.0
_RIGHT = 20
_FARTHEST = 1e300
_MINUTE, _HOUR, _DAY = 60.0, 3600.0, 86_400.0
_AGES = (
    *(_MINUTE * n for n in (1, 5, 10, 30)),
    *(_HOUR * n for n in (1, 2, 3, 6, 12)),
    *(_DAY * n for n in (1, 2, 7, 14, 30, 91, 182, 365)),
)
"""Distances between the ticks of an axis of ages."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a chart."""

    x: float
    y: float
    title: str
    kind: str = ""
    """Selects the color."""
    link: str = ""
    """The page about it."""
    on_line: bool = True
    """Whether the line goes through it."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A tick of an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class ChartMark:
    """A dot."""

    x: float
    y: float
    title: str
    kind: str
    link: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line with a dot at each value."""

    points: str
    """The points of the polyline."""
    area: str
    """The polygon between the line and the axis; empty without a line."""
    marks: tuple[ChartMark, ...]


@dataclass(frozen=True, slots=True)
class Spark:
    """A small line without axes."""

    points: str
    area: str


@dataclass(frozen=True, slots=True)
class Plot:
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


@dataclass(frozen=True, slots=True)
class Bar:
    """The mean and the maximum of adjacent values."""

    x: float
    width: float
    mean: float
    """Height from the bottom."""
    largest: float
    title: str


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar chart; adjacent values share a bar if there are too many."""

    width: int
    height: int
    left: int
    right: int
    bottom: int
    bars: tuple[Bar, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Cell:
    """One square of a grid, for one item or several adjacent ones."""

    x: float
    y: float
    title: str
    kind: str
    filled: float
    """From 0 to the size of the square."""


def compact(number: float) -> str:
    """A number in few characters: 1.2k, 3.5M, 1.2e-05."""
    size = abs(number)
    if not isfinite(number) or (size and size < 1e-3) or size >= 1e21:
        return f"{number:.3g}"
    if size < 1000:
        return f"{number:.4g}"
    power = min(len(_SUFFIXES) - 1, floor(log10(size)) // 3)
    return f"{number / 1000**power:.4g}{_SUFFIXES[power]}"


def sparkline(values: Iterable[float], width: int = 120, height: int = 24) -> Spark | None:
    """A line of the finite values; None if there are fewer than two."""
    known = [value for value in values if isfinite(value)]
    if len(known) < 2:
        return None
    low, high = min(known), max(known)
    step = (width - 4) / (len(known) - 1)
    places = [
        (round(2 + i * step, 1), round(height - 2 - (height - 4) * _share(value, low, high), 1))
        for i, value in enumerate(known)
    ]
    return Spark(_polyline(places), _area(places, height))


def plot(
    lines: Sequence[Sequence[Point]],
    write: Callable[[float], str] = compact,
    width: int = 1088,
    height: int = 300,
    log: bool = False,
    ages: bool = False,
    from_zero: bool = False,
) -> Plot:
    """A plot of the finite points, by ascending x. Very many points are thinned out evenly; the first and last stay.

    write: formats a y value for its axis. log: a logarithmic y axis; values that are not positive are left out. ages: x
    is in seconds before now, as a negative number. from_zero: the y axis begins at 0 at the latest.
    """
    known = [_known(line, log) for line in lines]
    xs, ys = [p.x for line in known for p in line], [p.y for line in known for p in line]
    if from_zero and ys:
        ys += [0.0] if any(ys) else [0.0, 1.0]
    left, right, top, bottom = 74, width - 16, 12, height - 30
    x_low, x_high = _limits(xs)
    y_low, y_high = _limits(ys)
    written = (lambda value: write(10.0**value)) if log else write

    def across(value: float) -> float:
        return round(left + _EDGE + (right - left - 2 * _EDGE) * _share(value, x_low, x_high), 1)

    def up(value: float) -> float:
        return round(bottom - _EDGE - (bottom - top - 2 * _EDGE) * _share(value, y_low, y_high), 1)

    def line(found: Sequence[Point]) -> Line:
        marks = tuple(ChartMark(across(p.x), up(p.y), p.title, p.kind, p.link) for p in found)
        places = [(mark.x, mark.y) for mark, p in zip(marks, found, strict=True) if p.on_line]
        return Line(_polyline(places), _area(places, bottom), marks)

    return Plot(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        lines=tuple(line(found) for found in known),
        x_ticks=tuple(
            Tick(across(value), _age(value) if ages else compact(value))
            for value in (_age_ticks if ages else _ticks)(xs, 6)
        ),
        y_ticks=tuple(Tick(up(value), written(value)) for value in (_log_ticks if log else _ticks)(ys, 4)),
    )


def step_axis(steps: Sequence[int], left: float, right: float) -> tuple[Callable[[float], float], tuple[Tick, ...]]:
    """The place of a step between two edges, and the ticks."""
    low, high = _limits(steps)

    def across(step: float) -> float:
        return round(left + _EDGE + (right - left - 2 * _EDGE) * _share(step, low, high), 1)

    return across, tuple(Tick(across(value), compact(value)) for value in _ticks(steps, 6))


def _polyline(places: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in places)


def _area(places: Sequence[tuple[float, float]], bottom: float) -> str:
    if not places:
        return ""
    return _polyline([(places[0][0], bottom), *places, (places[-1][0], bottom)])


def _known(points: Iterable[Point], log: bool) -> list[Point]:
    """The points that can be drawn, by ascending x."""
    finite = (p for p in points if isfinite(p.x) and isfinite(p.y) and (p.y > 0 or not log))
    drawable = (replace(p, x=_drawable(p.x), y=log10(y) if log else y) for p in finite for y in [_drawable(p.y)])
    return _thinned(sorted(drawable, key=lambda p: p.x), _MAX_MARKS)


def _drawable(value: float) -> float:
    """The value, clamped so that differences stay finite."""
    return max(-_FARTHEST, min(_FARTHEST, value))


def bars(values: Sequence[int], name: str, write: Callable[[int], str], width: int = 1088, height: int = 200) -> Bars:
    """A bar for each value, or for groups of adjacent values, so that there are at most 128 bars.

    name: of the item that a value belongs to; items are numbered from 0. write: formats a value.
    """
    left, bottom, top = 74, height - 26, 10
    group = -(-len(values) // 128) or 1
    spans = [range(at, min(at + group, len(values))) for at in range(0, len(values), group)]
    high = max(values, default=0) or 1
    room = (width - left - _RIGHT) / max(1, len(spans))
    drawn = []
    for i, span in enumerate(spans):
        own = [values[at] for at in span]
        mean, largest = sum(own) / len(own), max(own)
        text = f"{name} {span[0]}: {write(largest)}"
        if len(own) > 1:
            text = f"{name}s {span[0]}–{span[-1]}: {write(int(mean))} each, {write(largest)} at most"
        scale = (bottom - top) / high
        drawn.append(Bar(round(left + i * room, 2), round(room * 0.86, 2), mean * scale, largest * scale, text))
    labels = [span[0] for span in spans]
    every = -(-len(labels) // 12) or 1
    x_ticks = tuple(Tick(left + (i + 0.43) * room, str(labels[i])) for i in range(0, len(labels), every))
    y_ticks = tuple(Tick(bottom - (bottom - top) * part, write(int(high * part))) for part in (0.0, 0.5, 1.0))
    return Bars(width, height, left, width - _RIGHT, bottom, tuple(drawn), x_ticks, y_ticks)


def _thinned(points: list[Point], most: int) -> list[Point]:
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    if low < high:
        return low, high
    margin = abs(low) / 10 or 1.0
    return low - margin, high + margin


def _share(value: float, low: float, high: float) -> float:
    """Position of a value between two others, from 0 to 1. Operands are halved, because a difference can overflow."""
    span = high / 2 - low / 2
    return (value / 2 - low / 2) / span if span > 0 else 0.5


def _ticks(values: Sequence[float], count: int) -> list[float]:
    """The ticks for an axis of these values."""
    if not values or min(values) == max(values):
        return list(values[:1])
    found = _round_numbers(min(values), max(values), count)
    whole = all(value.is_integer() for value in map(float, values))
    return [value for value in found if not whole or value.is_integer()]


def _log_ticks(exponents: Sequence[float], count: int) -> list[float]:
    """The ticks for a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone. All as exponents."""
    if not exponents or min(exponents) == max(exponents):
        return list(exponents[:1])
    low, high = min(exponents), max(exponents)
    powers = range(floor(low), floor(high) + 1)
    for factors in ((1, 2, 5), (1,)):
        found = [at for power in powers for factor in factors if low <= (at := power + log10(factor)) <= high]
        if 2 <= len(found) <= 2 * count:
            return found
    return found[:: -(-len(found) // (2 * count))] if len(found) > 1 else [low, high]


def _age_ticks(values: Sequence[float], count: int) -> list[float]:
    """The ticks for an axis of seconds before now: whole minutes, hours or days."""
    if not values or min(values) == max(values):
        return list(values[:1])
    low, high = min(values), max(values)
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
