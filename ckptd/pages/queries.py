"""The queries of pages that have forms, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from urllib.parse import urlencode

import msgspec
from fastapi import Request

from ckptstore.commits.catalog import State
from ckptstore.errors import InvalidRequest
from ckptstore.format.records import Policy
from ckptstore.names import MAX_STEP

MOST_LINES = 5
"""Maximum number of lines of one run in its plot."""


class RunOrder(StrEnum):
    """Orders of the list of runs."""

    NAME = "name"
    NEWEST = "last commit"
    LARGEST = "stored"
    MOST = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPageQuery:
    """The query of a run's page."""

    metric: str = ""
    also: tuple[str, ...] = ()
    """Further metrics in the plot."""
    other: str = ""
    """Another run whose metric is in the plot."""
    log: bool = False
    """Whether the plot has a logarithmic scale."""
    state: State | None = None
    min_step: int | None = None
    max_step: int | None = None
    page: int = 1
    keep: int | None = None
    """Preview of a prune: number of newest checkpoints to keep."""
    every: int | None = None
    """Step interval of checkpoints to keep."""
    best: str = ""
    """The best by a metric: METRIC:min:N or METRIC:max:N."""
    abandoned: int | None = None
    """Days for which abandoned checkpoints are kept; None: the default of a policy."""
    healthy: bool = False
    """Keep the newest checkpoint without NaN and Inf, too."""
    plan: bool = False
    """Preview what the policy in force would delete, which may be blocked."""

    @property
    def policy(self) -> Policy | None:
        """The policy to preview; None without a preview. Raises InvalidRequest."""
        if not (self.keep or self.every or self.best or self.healthy):
            return None
        best = (self.best,) if self.best else ()
        policy = Policy(
            keep_last=self.keep or 0, keep_every=self.every or 0, keep_best=best, keep_healthy=int(self.healthy)
        )
        if self.abandoned is None:
            return policy
        return msgspec.structs.replace(policy, keep_abandoned_s=self.abandoned * 24 * 3600.0)

    @property
    def plotted(self) -> tuple[str, ...]:
        """The metrics in the plot."""
        return (self.metric, *self.also)

    def toggled(self, metric: str) -> str:
        """A query string like this one, with a metric added to the plot or removed; the last one stays."""
        others = tuple(name for name in self.plotted if name != metric)
        if metric not in self.plotted:
            others = (*others[: MOST_LINES - 1], metric)
        return self.link(metric=others[0], also=others[1:]) if others else self.link()

    def values(self, name: str) -> list[str]:
        """The values of a parameter, as in a query string."""
        value = self._parameters()[name]
        several = value if isinstance(value, tuple) else (value,)
        return [str(one) for one in several if one not in (None, "")]

    def link(self, **changed: object) -> str:
        """A query string like this one, with some values changed."""
        query = replace(self, **changed)  # type: ignore[arg-type]
        wanted = {name: value for name, value in query._parameters().items() if value not in (None, "", ())}
        return "?" + urlencode(wanted, doseq=True)

    def _parameters(self) -> dict[str, object]:
        return {
            "metric": self.metric,
            "also": self.also,
            "other": self.other,
            "log": 1 if self.log else None,
            "state": self.state,
            "min_step": self.min_step,
            "max_step": self.max_step,
            "page": self.page if self.page > 1 else None,
            "keep": self.keep,
            "every": self.every,
            "best": self.best,
            "abandoned": self.abandoned,
            "healthy": 1 if self.healthy else None,
            "plan": 1 if self.plan else None,
        }


def page_query(request: Request) -> RunPageQuery:
    """The query of the page of a run. Raises InvalidRequest."""
    state = request.query_params.get("state", "")
    if state and state not in tuple(State):
        raise InvalidRequest(f"{state[:40]!r} is not a state of a checkpoint", f"Use one of {', '.join(State)}")
    return RunPageQuery(
        metric=request.query_params.get("metric", "")[:400],
        also=_several(request, "also"),
        other=request.query_params.get("other", "")[:128],
        log=bool(number(request, "log")),
        state=State(state) if state else None,
        min_step=number(request, "min_step"),
        max_step=number(request, "max_step"),
        page=number(request, "page") or 1,
        keep=number(request, "keep"),
        every=number(request, "every"),
        best=request.query_params.get("best", "")[:400],
        abandoned=number(request, "abandoned"),
        healthy=bool(number(request, "healthy")),
        plan=bool(number(request, "plan")),
    )


def _several(request: Request, name: str) -> tuple[str, ...]:
    """The values of a parameter that may be repeated: the first ones, each once."""
    given = (text[:400] for text in request.query_params.getlist(name) if text)
    return tuple(islice(dict.fromkeys(given), MOST_LINES - 1))


def search(request: Request) -> tuple[str, RunOrder]:
    """The text and the order of the list of runs. Raises InvalidRequest."""
    order = request.query_params.get("sort", "") or RunOrder.NAME
    if order not in tuple(RunOrder):
        raise InvalidRequest(f"{order[:40]!r} is not an order of runs", f"Use one of {', '.join(RunOrder)}")
    return request.query_params.get("q", "")[:200].strip(), RunOrder(order)


def number(request: Request, name: str, default: int | None = None) -> int | None:
    """A whole number in the query; `default` if it is absent. Raises InvalidRequest."""
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_STEP))):
        raise InvalidRequest(f"{name} is {text[:40]!r}", "Use a whole number")
    return int(text)
