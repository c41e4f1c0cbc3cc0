"""The queries of pages that have forms, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Annotated, TypeVar
from urllib.parse import urlencode

import msgspec
from fastapi import Request

from ckptstore.commits.catalog import State
from ckptstore.errors import InvalidRequest
from ckptstore.format.decoding import convert
from ckptstore.format.records import Policy
from ckptstore.names import MAX_STEP

MOST_LINES = 5
"""Maximum number of lines of one run in its plot."""
PAGE_ROWS = 50
Text = Annotated[str, msgspec.Meta(max_length=400)]
Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_STEP)]
_T = TypeVar("_T")


def paged(found: Sequence[_T], number: int) -> tuple[Sequence[_T], int, int]:
    """The rows of a page, its number, and the number of pages. number: the page that is asked for."""
    num_pages = -(-len(found) // PAGE_ROWS) or 1
    number = min(max(1, number), num_pages)
    return found[(number - 1) * PAGE_ROWS : number * PAGE_ROWS], number, num_pages


class RunOrder(StrEnum):
    """Orders of the list of runs."""

    NAME = "name"
    NEWEST = "last commit"
    LARGEST = "stored"
    MOST = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsQuery:
    """The query of the list of runs."""

    q: Text = ""
    """Text to find."""
    sort: RunOrder = RunOrder.NAME
    page: Number = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPageQuery:
    """The query of a run's page."""

    metric: Text = ""
    also: tuple[Text, ...] = ()
    """Further metrics in the plot."""
    other: Text = ""
    """Other runs whose metric is in the plot: names and patterns, with blanks between them."""
    log: bool = False
    """Whether the plot has a logarithmic scale."""
    smooth: Annotated[float, msgspec.Meta(ge=0, le=0.99)] = 0.0
    """The weight of what comes before each point in the lines that are drawn; 0: they go through the points."""
    state: State | None = None
    min_step: Number | None = None
    max_step: Number | None = None
    page: Number = 1
    keep: Number | None = None
    """Preview of a prune: number of newest checkpoints to keep."""
    every: Number | None = None
    """Step interval of checkpoints to keep."""
    best: Text = ""
    """The best by a metric: METRIC:min:N or METRIC:max:N."""
    abandoned: Number | None = None
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
    def rules(self) -> str:
        """The policy to preview, as options of ckptctl prune."""
        given = (("--keep", self.keep), ("--keep-every", self.every), ("--keep-best", self.best))
        options = [f"{option} {value}" for option, value in given if value]
        options += ["--keep-healthy 1"] * self.healthy
        return " ".join([*options, *([] if self.abandoned is None else [f"--keep-abandoned {self.abandoned}d"])])

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
        value = self._parameters().get(name, ())
        return [str(one) for one in (value if isinstance(value, tuple) else (value,))]

    def link(self, **changed: object) -> str:
        """A query string like this one, with some values changed."""
        query = replace(self, **changed)  # type: ignore[arg-type]
        return "?" + urlencode(query._parameters(), doseq=True)

    def _parameters(self) -> dict[str, object]:
        """The values that are not the default."""
        given = ((field, getattr(self, field.name)) for field in fields(self))
        return {field.name: 1 if value is True else value for field, value in given if value != field.default}


def page_query(request: Request) -> RunPageQuery:
    """The query of the page of a run. Raises InvalidRequest."""
    also = dict.fromkeys(text for text in request.query_params.getlist("also") if text)
    return query_of(request, RunPageQuery, also=tuple(also)[: MOST_LINES - 1])


def query_of(request: Request, kind: type[_T], **others: object) -> _T:
    """The query of a page, an instance of `kind` with other values. Raises InvalidRequest."""
    # A form sends its empty fields, too.
    given = {name: value for name, value in request.query_params.items() if value}
    try:
        return convert({**given, **others}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the query is not valid: {error}", "Use the form of the page") from error
