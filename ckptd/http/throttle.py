"""Temporarily blocks addresses with too many failed authentications."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from ckptstore.errors import TooManyFailures

MAX_FAILURES = 10
WINDOW_S = 60.0
_MAX_ADDRESSES = 10_000
_MAX_TRUSTED = 10_000
_K = TypeVar("_K")
_V = TypeVar("_V")


class Throttle:
    """Counts failures per address. For one event loop.

    A token that an address has used successfully is never blocked: one job with a wrong token must not lock out the
    others on its host, or behind the same proxy.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._trusted: OrderedDict[tuple[str, int], None] = OrderedDict()

    def check(self, address: str, secret: str) -> None:
        """Raises TooManyFailures if the address is blocked for this token."""
        began, count = self._failures.get(address, (0.0, 0))
        if count < MAX_FAILURES or self._now() - began >= WINDOW_S or (address, hash(secret)) in self._trusted:
            return
        raise TooManyFailures(
            f"{count} requests from {address} had a wrong token within {WINDOW_S:.0f} seconds",
            "Correct the token, and wait a minute",
        )

    def succeeded(self, address: str, secret: str) -> None:
        """Trust this token from this address from now on."""
        _remember(self._trusted, (address, hash(secret)), None, _MAX_TRUSTED)

    def failed(self, address: str) -> None:
        """Count a failure."""
        now = self._now()
        began, count = self._failures.get(address, (now, 0))
        fresh = now - began >= WINDOW_S
        _remember(self._failures, address, (now, 1) if fresh else (began, count + 1), _MAX_ADDRESSES)


def _remember(table: OrderedDict[_K, _V], key: _K, value: _V, limit: int) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > limit:
        table.popitem(last=False)
