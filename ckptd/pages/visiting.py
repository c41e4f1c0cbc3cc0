"""The visitor of a page, and what every page shows or reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from ckptapi.listing import Filter, Sort
from ckptd.http.access import caller_of
from ckptd.http.context import Context
from ckptd.pages.forms import VISIT, Visit
from ckptd.services.callers import Caller
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import Damaged, Unavailable
from ckptstore.names import check_run

MOST_CHECKPOINTS = 5_000
"""Maximum number of checkpoints on the page of a run."""
RESTORES = 100
"""Maximum number of restore sessions on a page."""
_PATIENCE_S = 3.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Visitor:
    """The user who views a page."""

    caller: Caller
    now: float
    csrf: str
    """The CSRF token for the forms."""
    logged_in: bool
    """Logged in by the form instead of by a header."""

    @property
    def name(self) -> str:
        """The name of the token."""
        return self.caller.name

    @property
    def pages(self) -> tuple[str, ...]:
        """Pages in the navigation. Pages about all runs are hidden from callers that are bound to some."""
        everybody = ("/", "/attempts", "/restores")
        return everybody if self.caller.bound else (*everybody, "/jobs", "/store")


async def _visitor(request: Request) -> Visitor:
    visit: Visit = request.scope[VISIT]
    return Visitor(caller_of(request), visit.now, visit.secret, visit.logged_in)


Visiting = Annotated[Visitor, Depends(_visitor)]


def frame(request: Request, visitor: Visitor, live_s: int = 0) -> dict[str, Any]:
    """The values that every page shows. live_s: refresh interval in seconds; 0: no refresh."""
    return {"visitor": visitor, "now": visitor.now, "here": request.url.path, "live_s": live_s}


async def soon(ctx: Context, work: Callable[..., _T], *args: Any) -> _T | None:
    """The result of a call to the store; None if the store is slow, so that the rest of the page is shown."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await ctx.threads.store(work, *args)
    except (TimeoutError, Unavailable, Damaged):
        return None


def newest(ctx: Context, run: str, limit: int) -> list[Checkpoint]:
    """The checkpoints of a run, newest step first. Raises InvalidName or NoCheckpoint."""
    return ctx.services.catalog.page(Filter(run=check_run(run)), Sort.RUN, None, limit).checkpoints
