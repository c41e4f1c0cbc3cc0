"""Numbers for people, and from people: what ckptstore.human writes, and lengths and sizes as they are typed. Pure."""

from __future__ import annotations

from ckptstore.errors import InvalidRequest
from ckptstore.human import age, count, duration, metrics, moment, ratio, size

__all__ = ["age", "count", "duration", "metrics", "moment", "parse_duration", "parse_size", "ratio", "size"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_duration(text: str) -> float:
    """Seconds in "90s", "30m", "24h" or "7d". Raises InvalidRequest."""
    number, unit = text[:-1], text[-1:]
    if unit not in _SECONDS or not (number.isascii() and number.isdigit()):
        raise InvalidRequest(f"{text!r} is not a length of time", "Write it like 90s, 30m, 24h or 7d")
    return float(int(number) * _SECONDS[unit])


def parse_size(text: str) -> int:
    """Bytes in "500MB", "5GB" or "4GiB". Raises InvalidRequest."""
    for unit, factor in _SIZES.items():
        number = text.removesuffix(unit)
        if number != text and number.isascii() and number.isdigit() and int(number):
            return int(number) * factor
    raise InvalidRequest(f"{text!r} is not a size", "Write it like 500MB, 5GB or 4GiB")
