"""Geometry of bars and grids: numbers to bars and cells, in SVG units. Pure; the templates draw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptstore.charts import Tick

_RIGHT = 20


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
