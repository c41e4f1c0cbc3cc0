"""Authorization: checks the caller's scopes and runs against the endpoint's rule before the endpoint runs.

A caller that is bound to some runs must name one of them, except in listings, which filter their results.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from ckptapi.bodies import JobRequest, Scope
from ckptd.http.rules import JOBS, in_body, rule_of
from ckptd.services.callers import Caller
from ckptstore.names import Reference

CALLER = "ckptd_caller"
"""The key of the caller in the ASGI scope."""
_WILD = frozenset("*?")


def caller_of(request: Request) -> Caller:
    """The authenticated caller. Raises KeyError without one, so that a wiring mistake denies access."""
    caller: Caller = request.scope[CALLER]
    return caller


async def authorize(request: Request) -> None:
    """Check a request against its endpoint's rule. Raises Forbidden, or the errors of looking up the run."""
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
    """Raises Forbidden unless the caller may make the request that this body describes. Called by read_body."""
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
"""For endpoints whose answer depends on the caller."""
