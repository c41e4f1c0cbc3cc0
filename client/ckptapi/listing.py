"""Conditions and orders of a listing of checkpoints, as the daemon and the command line share them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from fnmatch import fnmatchcase
from math import inf, isfinite
from operator import attrgetter
from typing import Any, NamedTuple

from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import InvalidName, InvalidRequest
from ckptstore.values import Record

_GLOB = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._=,/*?-]{0,127}")
_BOUND = re.compile(r"([^<>=:]{1,128})(<=|>=)(-?[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][+-]?[0-9]{1,3})?)")


class Sort(StrEnum):
    """Sort orders; a minus sign means descending."""

    RUN = "run"
    """By run, then newest generation and step first."""
    STEP = "step"
    STEP_FALLING = "-step"
    COMMITTED = "committed_at"
    COMMITTED_FALLING = "-committed_at"
    SIZE = "stored_bytes"
    SIZE_FALLING = "-stored_bytes"


class Bound(NamedTuple):
    """A condition on a metric: it must exist and be within the limits, inclusive."""

    metric: str
    least: float = -inf
    most: float = inf

    @staticmethod
    def parse(text: str) -> Bound:
        """The condition in NAME<=NUMBER or NAME>=NUMBER. Raises InvalidRequest."""
        match = _BOUND.fullmatch(text)
        if match is None:
            raise InvalidRequest(f"{text[:80]!r} is not a metric filter", "Use NAME<=NUMBER or NAME>=NUMBER")
        number = float(match[3])
        return Bound(match[1], least=number) if match[2] == ">=" else Bound(match[1], most=number)

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint's metric is a number within the limits."""
        value = checkpoint.metrics.get(self.metric, inf)
        return isfinite(value) and self.least <= value <= self.most


class Tagged(NamedTuple):
    """A condition on a tag: it must exist, with this value unless that is None."""

    name: str
    value: str | None = None

    @staticmethod
    def parse(text: str) -> Tagged:
        """The condition in NAME or NAME=VALUE. Raises InvalidRequest."""
        name, equals, value = text.partition("=")
        if not 0 < len(name) <= 64 or len(value) > 256:
            raise InvalidRequest(f"{text[:80]!r} is not a tag filter", "Use NAME or NAME=VALUE")
        return Tagged(name, value if equals else None)

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint has the tag."""
        found = checkpoint.tags.get(self.name)
        return found is not None and self.value in (None, found)


class Filter(Record):
    """Conditions that must all hold. A condition that is left out always holds."""

    run: str | None = None
    """The name of a run, with the wildcards * and ?."""
    globs: tuple[str, ...] = ()
    """The run must match one of these patterns, if there are any."""
    states: frozenset[State] = frozenset()
    min_step: int | None = None
    max_step: int | None = None
    since: float | None = None
    until: float | None = None
    """Both limit the commit time, in seconds since the epoch."""
    bounds: tuple[Bound, ...] = ()
    tags: tuple[Tagged, ...] = ()

    @property
    def one_run(self) -> str | None:
        """The run, if the filter names exactly one."""
        return None if self.run is None or is_glob(self.run) else self.run

    @property
    def exact(self) -> bool:
        """Whether a database can evaluate all conditions."""
        return not (self.globs or self.bounds or self.tags) and self.run == self.one_run

    def admits(self, checkpoint: Checkpoint) -> bool:
        """Whether all conditions hold."""
        named = self.run is None or fnmatchcase(checkpoint.run, self.run)
        allowed = not self.globs or any(fnmatchcase(checkpoint.run, glob) for glob in self.globs)
        wanted: tuple[Bound | Tagged, ...] = (*self.bounds, *self.tags)
        return (
            named
            and allowed
            and (not self.states or checkpoint.state in self.states)
            and _within(checkpoint.step, self.min_step, self.max_step)
            and _within(checkpoint.committed_at, self.since, self.until)
            and all(condition.admits(checkpoint) for condition in wanted)
        )


def in_order(checkpoints: Iterable[Checkpoint], sort: Sort) -> list[Checkpoint]:
    """The checkpoints in a sort order. Equal ones are sorted as by Sort.RUN."""
    found = sorted(checkpoints, key=_by_run)
    if sort is Sort.RUN:
        return found
    return sorted(found, key=attrgetter(sort.lstrip("-")), reverse=sort.startswith("-"))


def is_glob(text: str) -> bool:
    """Whether the name of a run has wildcards."""
    return bool(set("*?") & set(text))


def check_glob(text: str) -> str:
    """`text` itself, or InvalidName unless it is the name of a run or a pattern with the wildcards * and ?."""
    if not _GLOB.fullmatch(text) or ".." in text:
        raise InvalidName(
            f"{text[:200]!r} is not a run or a pattern of runs", "Use the name of a run; * and ? are wildcards"
        )
    return text


def _by_run(checkpoint: Checkpoint) -> tuple[Any, ...]:
    attempt = checkpoint.attempt
    return checkpoint.run, -attempt.generation, -attempt.step, -checkpoint.committed_at, attempt.ulid


def _within(value: float, least: float | None, most: float | None) -> bool:
    return (least is None or value >= least) and (most is None or value <= most)
