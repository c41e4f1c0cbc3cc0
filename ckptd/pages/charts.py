"""Chart geometry: numbers to points, bars and ticks, in SVG units. Pure; the templates draw them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import floor, isfinite, log10

_SUFFIXES = ("", "k", "M", "G", "T", "P", "E")
_MAX_MARKS = 300
_EDGE = 4.0
_RIGHT = 20
_FARTHEST = 1e300


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a chart."""

    x: float
    y: float
    title: str
    kind: str = ""
    """Selects the color."""


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


@dataclass(frozen=True, slots=True)
class Plot:
    """A line with dots and two axes."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    """The last four: edges of the plot area."""
    line: str
    """The points of the polyline."""
    more: tuple[str, ...]
    """Further polylines."""
    marks: tuple[ChartMark, ...]
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


def sparkline(values: Iterable[float], width: int = 120, height: int = 24) -> str:
    """Points of a polyline; empty if there are fewer than two finite values."""
    known = [value for value in values if isfinite(value)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    step = (width - 4) / (len(known) - 1)
    return " ".join(
        f"{2 + i * step:.1f},{height - 2 - (height - 4) * _share(value, low, high):.1f}"
        for i, value in enumerate(known)
    )


def plot(
    points: Sequence[Point],
    write: Callable[[float], str] = compact,
    width: int = 860,
    height: int = 260,
    more: Sequence[Sequence[Point]] = (),
    log: bool = False,
) -> Plot:
    """A plot of the finite points, by ascending x. Very many points are thinned out evenly; the first and last stay.

    write: formats a y value for its axis. more: further lines, without marks. log: a logarithmic y axis; values that
    are not positive are left out.
    """
    known, *others = [_known(line, log) for line in (points, *more)]
    together = [point for line in (known, *others) for point in line]
    left, right, top, bottom = 74, width - 16, 12, height - 30
    x_low, x_high = _limits([p.x for p in together])
    y_low, y_high = _limits([p.y for p in together])
    written = (lambda value: write(10.0**value)) if log else write

    def across(value: float) -> float:
        return round(left + _EDGE + (right - left - 2 * _EDGE) * _share(value, x_low, x_high), 1)

    def up(value: float) -> float:
        return round(bottom - _EDGE - (bottom - top - 2 * _EDGE) * _share(value, y_low, y_high), 1)

    def line(found: Sequence[Point]) -> str:
        return " ".join(f"{across(p.x)},{up(p.y)}" for p in found)

    return Plot(
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        line=line(known),
        more=tuple(line(found) for found in others),
        marks=tuple(ChartMark(across(p.x), up(p.y), p.title, p.kind) for p in known),
        x_ticks=tuple(Tick(across(value), compact(value)) for value in _ticks([p.x for p in together], 6)),
        y_ticks=tuple(
            Tick(up(value), written(value)) for value in (_log_ticks if log else _ticks)([p.y for p in together], 4)
        ),
    )


def _known(points: Iterable[Point], log: bool) -> list[Point]:
    """The points that can be drawn, by ascending x."""
    finite = (p for p in points if isfinite(p.x) and isfinite(p.y) and (p.y > 0 or not log))
    drawable = (replace(p, x=_drawable(p.x), y=log10(y) if log else y) for p in finite for y in [_drawable(p.y)])
    return _thinned(sorted(drawable, key=lambda p: p.x), _MAX_MARKS)


def _drawable(value: float) -> float:
    """The value, clamped so that differences stay finite."""
    return max(-_FARTHEST, min(_FARTHEST, value))


def bars(values: Sequence[int], name: str, write: Callable[[int], str], width: int = 860, height: int = 180) -> Bars:
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
