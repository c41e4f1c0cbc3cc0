"""Holds requests to the rules: who asks, by which token, and which runs are its business.

Before an endpoint runs, its rule is checked. Callers bound to some runs must name a run that is theirs; only listings
that filter for themselves answer them without.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from ckptapi.bodies import JobRequest, Scope
from ckptd.http.rules import JOBS, in_body, rule_of
from ckptd.services.callers import Caller
from ckptstore.names import Reference

CALLER = "ckptd_caller"
"""Where the request keeps its caller."""
_WILD = frozenset("*?")


def caller_of(request: Request) -> Caller:
    """Who asks. Raises KeyError if nobody was authenticated, so that a mistake in the wiring lets nobody in."""
    caller: Caller = request.scope[CALLER]
    return caller


async def authorize(request: Request) -> None:
    """Let pass what its rule allows. Raises Forbidden, or what looking up the run raises."""
    rule = rule_of(request)
    if rule.scope is None:
        return
    caller = caller_of(request)
    caller.check_scope(rule.scope)
    if not caller.bound or rule.run is in_body:
        return
    run = await rule.run(request) if rule.run is not None else None
    if not (rule.filters and (run is None or _WILD & set(run))):
        caller.check_run(run)


def check_body(request: Request, body: Any) -> None:
    """Raises Forbidden unless the caller may ask for what a body says. For whoever reads the body."""
    caller = caller_of(request)
    if isinstance(body, JobRequest):
        caller.check_scope(JOBS.get(type(body), Scope.ADMIN))
    if not caller.bound:
        return
    ids = (getattr(body, name, None) for name in ("id", "checkpoint"))
    runs = [getattr(body, "run", None), *(Reference.parse(id).run for id in ids if id is not None)]
    named = [run for run in runs if run is not None]
    if not named and rule_of(request).run is in_body:
        caller.check_run(None)
    for run in named:
        caller.check_run(run)


CallerDep = Annotated[Caller, Depends(caller_of)]
"""For endpoints that show only what their caller may see."""
