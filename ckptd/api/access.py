"""Who may do what: one row per endpoint. An endpoint without a row is for admins only.

Before an endpoint runs, the caller's scope is checked, and whether the run it names is the caller's business. Where a
request names no run, a listing shows only the caller's own; everything else is refused to callers bound to some runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from ckptd.api.context import Context
from ckptd.services.callers import Caller
from ckptstore import wire
from ckptstore.names import Reference
from ckptstore.wire import Scope

CALLER = "ckptd_caller"
"""Where the request keeps its caller."""
Naming = Callable[[Request], Awaitable[str | None]]
"""Finds the run that a request is about; None if whoever answers it shows only what the caller may see."""


async def _in_path(request: Request) -> str | None:
    return str(request.path_params["run"])


async def _in_query(request: Request) -> str | None:
    return request.query_params.get("run")


async def _in_body(request: Request) -> str | None:
    return None  # check_body looks at it


async def _of_checkpoint(request: Request) -> str | None:
    return Reference.parse(request.path_params["id"]).run


async def _of_restore(request: Request) -> str | None:
    context: Context = request.app.state.context
    restore = await context.threads.index(context.services.restores.find, request.path_params["id"])
    return restore.run


@dataclass(frozen=True, slots=True)
class Rule:
    """What an endpoint asks of its caller."""

    scope: Scope | None
    """None: nothing, not even a token."""
    run: Naming | None = None
    """None: it is about all runs, and not for callers bound to some."""


RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/livez"): Rule(None),
    ("GET", "/readyz"): Rule(None),
    ("GET", "/metrics"): Rule(Scope.READ),
    ("GET", "/checkpoints/latest"): Rule(Scope.READ, _in_query),
    ("GET", wire.LATEST): Rule(Scope.READ, _in_query),
    ("GET", wire.CHECKPOINTS): Rule(Scope.READ, _in_query),
    ("GET", wire.RUNS): Rule(Scope.READ, _in_query),
    ("GET", wire.CHECKPOINTS + "/{id}"): Rule(Scope.READ, _of_checkpoint),
    ("GET", wire.CHECKPOINTS + "/{id}/manifest"): Rule(Scope.READ, _of_checkpoint),
    ("GET", wire.CHECKPOINTS + "/{id}/receipts/{rank}"): Rule(Scope.READ, _of_checkpoint),
    ("GET", wire.CHECKPOINTS + "/{id}/shards/{name}"): Rule(Scope.READ, _of_checkpoint),
    ("POST", wire.NOTIFY): Rule(Scope.WRITE, _in_body),
    ("POST", wire.PRUNE): Rule(Scope.PRUNE, _in_body),
    ("POST", wire.REINDEX): Rule(Scope.ADMIN),
    ("POST", wire.LEASES): Rule(Scope.READ, _in_body),
    ("DELETE", wire.LEASES + "/{run}/{lease}"): Rule(Scope.READ, _in_path),
    ("POST", wire.RESTORES): Rule(Scope.READ, _in_body),
    ("GET", wire.RESTORES): Rule(Scope.READ, _in_query),
    ("GET", wire.RESTORES + "/{id}"): Rule(Scope.READ, _of_restore),
    ("PUT", wire.RESTORES + "/{id}/ranks/{rank}"): Rule(Scope.READ, _of_restore),
    ("DELETE", wire.RESTORES + "/{id}"): Rule(Scope.READ, _of_restore),
    ("GET", wire.TOKENS): Rule(Scope.ADMIN),
    ("POST", wire.TOKENS): Rule(Scope.ADMIN),
    ("POST", wire.TOKENS + "/{name}/rotate"): Rule(Scope.ADMIN),
    ("DELETE", wire.TOKENS + "/{name}"): Rule(Scope.ADMIN),
}
_FOR_ADMINS = Rule(Scope.ADMIN)


def caller_of(request: Request) -> Caller:
    """Who asks. Raises KeyError if nobody was authenticated, so that a mistake in the wiring lets nobody in."""
    caller: Caller = request.scope[CALLER]
    return caller


async def authorize(request: Request) -> None:
    """Let pass what its rule allows. Raises Forbidden, or what looking up the run raises."""
    method = "GET" if request.method == "HEAD" else request.method
    rule = RULES.get((method, request.scope["route"].path), _FOR_ADMINS)
    if rule.scope is None:
        return
    caller = caller_of(request)
    caller.check_scope(rule.scope)
    if not caller.bound:
        return
    if rule.run is None:
        caller.check_run(None)
    elif (run := await rule.run(request)) is not None:
        caller.check_run(run)


def check_body(request: Request, body: Any) -> None:
    """Raises Forbidden unless the runs that a body names are the caller's business; it must name one."""
    caller = caller_of(request)
    if not caller.bound:
        return
    named = [run for run in (getattr(body, "run", None),) if run is not None]
    ids = (getattr(body, name, None) for name in ("id", "checkpoint"))
    named += [Reference.parse(id).run for id in ids if id is not None]
    for run in named or [None]:
        caller.check_run(run)


Asking = Annotated[Caller, Depends(caller_of)]
"""For endpoints that show only what their caller may see."""
