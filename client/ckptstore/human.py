"""Numbers for people: sizes, ages, durations, moments. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """Bytes in binary units, three digits."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        # 1023.6 would be rounded up to four digits.
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
    """A point in time, in UTC."""
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def ratio(part: int, whole: int) -> str:
    """`part` of `whole` in per cent."""
    return f"{part / whole:.0%}" if whole else "100%"


def count(number: int, noun: str) -> str:
    """`number` things."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("y") else f"{number:,} {noun}s"


def metrics(values: Mapping[str, float]) -> str:
    """name=value, four digits each."""
    return " ".join(f"{name}={value:.4g}" for name, value in sorted(values.items()))
