"""Curves over steps on a logarithmic axis, as an SVG file. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 900, 420, 80, 330, 40, 40
_COLORS = ("#2563eb", "#d97706", "#059669", "#7c3aed", "#db2777", "#0891b2", "#65a30d", "#9333ea", "#b45309", "#475569")
_STYLE = (
    "text{font:12px sans-serif;fill:#334155}.grid{stroke:#cbd5e1;stroke-width:1}svg{background:#fff}"
    "@media(prefers-color-scheme:dark){svg{background:#0f172a}text{fill:#cbd5e1}.grid{stroke:#334155}}"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: values by step, and the steps to mark in red."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: Sequence[float] = ()


def draw(title: str, curves: Sequence[Curve]) -> str:
    """The drawing. Values of 0 and below are left out."""
    known = [[(x, log10(y)) for x, y in curve.points if y > 0] for curve in curves]
    xs = [x for points in known for x, _ in points] + [x for curve in curves for x in curve.marked]
    ys = [y for points in known for _, y in points]
    x_low, x_high = min(xs, default=0.0), max(xs, default=1.0)
    y_low, y_high = floor(min(ys, default=0.0)), ceil(max(ys, default=1.0))
    y_high += y_low == y_high

    def across(x: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * ((x - x_low) / (x_high - x_low) if x_high > x_low else 0.5), 1)

    def up(y: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * (y - y_low) / (y_high - y_low), 1)

    def lines() -> Iterator[str]:
        yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
        yield f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        yield f'<text x="{_LEFT}" y="22">{escape(title)}</text>'
        for power in range(y_low, y_high + 1, max(1, (y_high - y_low) // 8)):
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{up(power)}" y2="{up(power)}"/>'
            yield f'<text x="{_LEFT - 8}" y="{up(power) + 4}" text-anchor="end">1e{power}</text>'
        for x in sorted({x_low, x_high}):
            yield f'<text x="{across(x)}" y="{_HEIGHT - 16}" text-anchor="middle">{x:,.0f}</text>'
        for number, (curve, points) in enumerate(zip(curves, known, strict=True)):
            color = _COLORS[number % len(_COLORS)]
            drawn = " ".join(f"{across(x)},{up(y)}" for x, y in points)
            yield f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{drawn}"/>'
            for x, y in points:
                yield f'<circle cx="{across(x)}" cy="{up(y)}" r="2" fill="{color}"/>'
            for x in curve.marked:
                y = dict(points).get(x, y_high)
                text = f"{escape(curve.name)}: NaN or Inf at step {x:,.0f}"
                yield f'<circle cx="{across(x)}" cy="{up(y)}" r="5" fill="#dc2626"><title>{text}</title></circle>'
            y_label = _TOP + 18 * number + 8
            yield f'<rect x="{_WIDTH - _RIGHT + 20}" y="{y_label - 9}" width="10" height="10" fill="{color}"/>'
            yield f'<text x="{_WIDTH - _RIGHT + 36}" y="{y_label}">{escape(_short(curve.name))}</text>'
        yield "</svg>"

    return "\n".join(lines()) + "\n"


def _short(name: str) -> str:
    return name if len(name) <= 44 else f"…{name[-43:]}"
