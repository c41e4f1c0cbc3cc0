"""Formats sizes, ages, durations and times for people, and parses what they type. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import inf, isfinite

from ckptstore.errors import InvalidRequest

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_FACTORS = {
    "s": {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0},
    "bytes": {"kB": 1e3}
    | {
        f"{prefix}{unit}": float(base ** (power + 1))
        for base, unit in ((1000, "B"), (1024, "iB"))
        for power, prefix in enumerate("KMGTP")
    },
    "count": {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
}
_FORMS = {
    "s": ("duration", "0.2s, 30m, 24h or 7d"),
    "bytes": ("size", "500MB, 2.5GB or 100GiB"),
    "count": ("number", "70e9 or 70B"),
}
_QUANTITY = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)(?P<unit>[A-Za-z]*)")


def size(count: float) -> str:
    """Bytes in binary units, three digits."""
    if count < 1024:
        return f"{count:.0f} B"
    value = count
    for unit in _UNITS:
        value /= 1024
        # 1023.6 would round to four digits.
        if value < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """How long ago, in at most two units."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes}m"
    if hours < 24:
        return f"{hours}h {minutes % 60:02d}m"
    return f"{days}d {hours % 24:02d}h" if days < 10 else f"{days}d"


def duration(seconds: float) -> str:
    """How long something took."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def moment(epoch: float) -> str:
    """A point in time since the epoch, in UTC."""
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def rfc3339(epoch: float) -> str:
    """A point in time as in RFC 3339, in UTC, to the millisecond; empty for one that no calendar has."""
    try:
        return datetime.fromtimestamp(epoch, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return ""


def ratio(part: int, whole: int) -> str:
    """`part` as a percentage of `whole`."""
    return f"{part / whole:.0%}" if whole else "100%"


def count(number: int, noun: str) -> str:
    """The number with its noun, in the plural unless it is 1."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def metrics(values: Mapping[str, float]) -> str:
    """name=value pairs sorted by name, with four significant digits."""
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(values.items()))


def tags(values: Mapping[str, str]) -> str:
    """name=value pairs sorted by name; the name alone if the value is empty."""
    return " ".join(f"{name}={value}" if value else name for name, value in sorted(values.items()))


def quantity(text: str, unit: str) -> float:
    """A decimal number with a unit. unit: s (durations, in seconds), bytes or count. Raises InvalidRequest."""
    match = _QUANTITY.fullmatch(text)
    value = float(match["number"]) * _FACTORS[unit].get(match["unit"], inf) if match is not None else inf
    if not isfinite(value):
        noun, examples = _FORMS[unit]
        raise InvalidRequest(f"{text!r} is not a {noun}", f"Write it like {examples}")
    return value


def parse_duration(text: str) -> float:
    """Seconds in "90s", "30m", "1.5h" or "7d". Raises InvalidRequest."""
    return quantity(text, "s")


def parse_size(text: str) -> int:
    """Bytes, at least 1, in "500MB", "2.5GB" or "4GiB". Raises InvalidRequest."""
    count = int(quantity(text, "bytes"))
    if not count:
        raise InvalidRequest(f"{text!r} is not above zero", "Write it like 500MB, 2.5GB or 100GiB")
    return count


def html_table(rows: Iterable[Iterable[str]]) -> str:
    """A table for notebooks."""
    from html import escape  # late: it loads all entities

    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
