"""Retries with exponential backoff. Tests pass the clock and the sleep."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import TypeVar

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_jitter = random.Random()
"""Not the global generator: its state is the trainer's, and part of each checkpoint."""


def pauses(
    first_s: float,
    longest_s: float = math.inf,
    *,
    factor: float = 2.0,
    tries: int | None = None,
    timeout_s: float = math.inf,
    jitter: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[float]:
    """The seconds to wait between tries: each pause is `factor` times the one before, up to `longest_s`.

    tries: ends after one pause less. timeout_s: ends that long after this call; the last pause is cut to fit.
    jitter: shorten each pause at random, by up to half, so that clients that failed together do not return together.
    """
    deadline = clock() + timeout_s

    def generate() -> Iterator[float]:
        pause = first_s
        for _ in count() if tries is None else range(tries - 1):
            left = deadline - clock()
            if left <= 0:
                return
            yield min(left, pause * _jitter.uniform(0.5, 1.0) if jitter else pause)
            pause = min(pause * factor, longest_s)

    return generate()


def outage_pauses(limit_s: float) -> Iterator[float]:
    """The pauses of requests to a service that is away. The limit begins with the first failure, not with the call."""
    yield from pauses(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, timeout_s=limit_s)


def retry(
    call: Callable[[], _T],
    errors: type[Exception] | tuple[type[Exception], ...],
    waits: Iterator[float],
    *,
    unless: Callable[[Exception], bool] = lambda _: False,
    sleep: Callable[[float], object] = time.sleep,
    log_level: int = logging.INFO,
) -> _T:
    """Repeat a call that raises one of `errors`; returns its result. Raises its last error when `waits` ends.

    unless: recognizes errors that are not retried. sleep: returns something
    true to stop retrying, as `threading.Event.wait` does.
    """
    while True:
        try:
            return call()
        except errors as error:
            if unless(error) or (pause := next(waits, None)) is None:
                raise
            logger.log(log_level, "retrying in %.1f s: %s", pause, error)
            if sleep(pause):
                raise
