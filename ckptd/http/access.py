"""Authorization: one rule per endpoint, and the check of the caller's scopes and runs before the endpoint runs.

An endpoint without a rule is for admins only, unless it belongs to the interface of the Hub (/hf/), which names runs in
its own way and checks each.

A caller that is bound to some runs must name one of them, except in listings, which filter their results.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import Depends, Request

from ckptapi import bodies
from ckptapi.bodies import JobRequest, Scope
from ckptd.http.context import context_of
from ckptd.index import Restore
from ckptd.services.tokens import Caller
from ckptstore.commits.leases import lease_holder
from ckptstore.errors import InvalidName, NotFound
from ckptstore.names import Reference
from ckptstore.values import Value

CALLER = "ckptd_caller"
"""The key of the caller in the ASGI scope."""
STILL_VALID = "ckptd_still_valid"
"""The key of a function in the ASGI scope that returns whether the caller's token is still valid."""
OF_TOKEN = ": "
"""Between a token and the holder that it names, in a lease. No name of a token contains it."""
_WILD = frozenset("*?")


def caller_of(request: Request) -> Caller:
    """The authenticated caller. Raises KeyError without one, so that a wiring mistake denies access."""
    caller: Caller = request.scope[CALLER]
    return caller


def validity_of(request: Request) -> Callable[[], bool]:
    """A function that returns whether the caller's token is still valid: not revoked, replaced or expired."""
    still_valid: Callable[[], bool] = request.scope[STILL_VALID]
    return still_valid


async def authorize(request: Request) -> None:
    """Check a request against its endpoint's rule. Raises Forbidden, or the errors of looking up the run."""
    rule = rule_of(request)
    if rule.scope is None:
        return
    caller = caller_of(request)
    caller.check_scope(rule.scope)
    if caller.runs and rule.run is not in_body:
        run = await rule.run(request) if rule.run is not None else None
        if not (rule.filters and (run is None or _WILD & set(run))):
            caller.check_run(run)
    if rule.owner is not None and (owner := await rule.owner(request)) is not None:
        caller.check_owner(owner)


def check_body(request: Request, body: Any) -> None:
    """Raises Forbidden unless the caller may make the request that this body describes. Called by read_body."""
    caller = caller_of(request)
    if isinstance(body, JobRequest):
        caller.check_scope(JOBS.get(type(body), ADMIN))
    if not caller.runs:
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


Naming = Callable[[Request], Awaitable[str | None]]
"""Returns the run that a request concerns; None for all runs."""

_ONE = bodies.CHECKPOINTS + "/{id}"


async def in_path(request: Request) -> str | None:
    """/…/{run}/…"""
    return str(request.path_params["run"])


async def in_query(request: Request) -> str | None:
    """?run=…"""
    return request.query_params.get("run")


async def of_checkpoint(request: Request) -> str | None:
    """/v1/checkpoints/{id}/…"""
    return Reference.parse(request.path_params["id"]).run


async def of_restore(request: Request) -> str | None:
    """/v1/restores/{id}/…"""
    return (await _restore(request)).run


async def opener_of_restore(request: Request) -> str | None:
    """/v1/restores/{id}/…"""
    try:
        return (await _restore(request)).by
    except (NotFound, InvalidName):
        return None  # the endpoint raises it, after it has checked the rest


async def _restore(request: Request) -> Restore:
    context = await context_of(request)
    return await context.with_index(context.restores.find, request.path_params["id"])


async def taker_of_lease(request: Request) -> str | None:
    """/v1/leases/{run}/{lease}. A lease that was taken without the daemon has no token: the empty name."""
    context = await context_of(request)
    run = context.source.run(request.path_params["run"])
    holder = await context.with_store(lease_holder, run, request.path_params["lease"])
    return holder and (holder.partition(OF_TOKEN)[0] if OF_TOKEN in holder else "")


async def of_job(request: Request) -> str | None:
    """/v1/jobs/{id}"""
    context = await context_of(request)
    job = await context.with_index(context.jobs.find, request.path_params["id"])
    checkpoint: Any = job.request.get("checkpoint")
    run: Any = Reference.parse(checkpoint).run if checkpoint else job.request.get("run")
    return str(run) if run else None


async def in_body(_: Request) -> str | None:
    """{"run": …}, {"id": …} or {"checkpoint": …}: ckptd.http.access.check_body checks it after it is read."""
    return None


class AccessRule(Value):
    """The permissions that an endpoint requires."""

    scope: Scope | None
    """None: no token is required."""
    run: Naming | None = None
    """None: the request concerns all runs, and callers bound to some runs are refused."""
    filters: bool = False
    """If no single run is named, the answer is limited to the caller's runs."""
    owner: Naming | None = None
    """The name of the token that began what the request ends; None in place of a name if it is gone."""


READ, WRITE, PRUNE, ADMIN = Scope
_FOR_ALL = AccessRule(None)
_FOR_ADMINS = AccessRule(ADMIN)
_READ_ALL = AccessRule(READ)
_READ_RUN = AccessRule(READ, in_query)
_READ_RUN_IN_PATH = AccessRule(READ, in_path)
_LIST = AccessRule(READ, in_query, filters=True)
_HUB = AccessRule(READ, filters=True)
"""The interface of the Hub answers about a run that the caller may not see as about one that is not there."""
_READ_CHECKPOINT = AccessRule(READ, of_checkpoint)
_PRUNE_CHECKPOINT = AccessRule(PRUNE, of_checkpoint)
_READ_RESTORE = AccessRule(READ, of_restore)
_CHANGE_RESTORE = AccessRule(READ, of_restore, owner=opener_of_restore)
_READ_JOB = AccessRule(READ, of_job)
_READ_IN_BODY = AccessRule(READ, in_body)
_WRITE_IN_BODY = AccessRule(WRITE, in_body)
_BY_METHOD = {
    "GET": {
        "/healthz": _FOR_ALL,
        "/livez": _FOR_ALL,
        "/readyz": _FOR_ALL,
        "/metrics": _READ_ALL,
        "/checkpoints/latest": _READ_RUN,
        bodies.LATEST: _READ_RUN,
        bodies.CHECKPOINTS: _LIST,
        _ONE: _READ_CHECKPOINT,
        _ONE + "/shards": _READ_CHECKPOINT,
        _ONE + "/entries": _READ_CHECKPOINT,
        _ONE + "/events": _READ_CHECKPOINT,
        _ONE + "/manifest": _READ_CHECKPOINT,
        _ONE + "/receipts/{rank}": _READ_CHECKPOINT,
        _ONE + "/statistics/{rank}": _READ_CHECKPOINT,
        _ONE + "/shards/{name}": _READ_CHECKPOINT,
        bodies.RUNS: _LIST,
        bodies.RUNS + "/{run}": _READ_RUN_IN_PATH,
        bodies.PINS: _READ_RUN,
        bodies.DELETED: _READ_RUN,
        bodies.AUDIT: _READ_RUN,
        bodies.POLICIES: _READ_ALL,
        bodies.POLICIES + "/history": _READ_ALL,
        bodies.RESTORES: _READ_RUN,
        bodies.RESTORES + "/{id}": _READ_RESTORE,
        bodies.EVENTS: _READ_RUN,
        bodies.ATTEMPTS: _READ_RUN,
        bodies.JOBS: _READ_ALL,
        bodies.JOBS + "/{id}": _READ_JOB,
        bodies.GOODPUT: _READ_RUN,
        bodies.TOKENS: _FOR_ADMINS,
        # Pages
        "/": _HUB,
        "/runs/{run}": _READ_RUN_IN_PATH,
        "/goodput/{run}": _READ_RUN_IN_PATH,
        "/checkpoints/{id}": _READ_CHECKPOINT,
        "/attempts": _LIST,
        "/restores": _LIST,
        "/restores/{id}": _READ_RESTORE,
        "/jobs": _READ_ALL,
        "/jobs/{id}": _READ_JOB,
        "/store": _READ_ALL,
    },
    "POST": {
        _ONE + "/undelete": _PRUNE_CHECKPOINT,
        bodies.RUNS + "/{run}/preempt": AccessRule(WRITE, in_path),
        bodies.NOTIFY: _WRITE_IN_BODY,
        bodies.DECISIONS: _WRITE_IN_BODY,
        bodies.PRUNE: AccessRule(PRUNE, in_body),
        bodies.REINDEX: _FOR_ADMINS,
        bodies.LEASES: _READ_IN_BODY,
        bodies.RESTORES: _READ_IN_BODY,
        bodies.JOBS: _READ_IN_BODY,  # and the scope of its kind, below
        bodies.PROBE: _FOR_ADMINS,
        bodies.TOKENS: _FOR_ADMINS,
        bodies.TOKENS + "/{name}/rotate": _FOR_ADMINS,
        # Pages
        "/runs/{run}": AccessRule(PRUNE, in_path),
        "/checkpoints/{id}": _READ_CHECKPOINT,  # and the scope of its action
        "/store": _FOR_ADMINS,
    },
    "PUT": {
        _ONE + "/pins/{name}": _PRUNE_CHECKPOINT,
        bodies.POLICIES: _FOR_ADMINS,
        bodies.RESTORES + "/{id}/ranks/{rank}": _CHANGE_RESTORE,
    },
    "PATCH": {_ONE: AccessRule(WRITE, of_checkpoint)},
    "DELETE": {
        _ONE: _PRUNE_CHECKPOINT,
        _ONE + "/pins/{name}": _PRUNE_CHECKPOINT,
        bodies.LEASES + "/{run}/{lease}": AccessRule(READ, in_path, owner=taker_of_lease),
        bodies.RESTORES + "/{id}": _CHANGE_RESTORE,
        bodies.JOBS + "/{id}": AccessRule(PRUNE, of_job),
        bodies.TOKENS + "/{name}": _FOR_ADMINS,
    },
}
RULES = {(method, path): rule for method, rules in _BY_METHOD.items() for path, rule in rules.items()}
JOBS: dict[type[Any], Scope] = {
    bodies.VerifyJob: READ,
    bodies.HealJob: WRITE,
    bodies.CollectJob: PRUNE,
}
"""The scope that starting a job of a kind requires; other kinds are for admins."""


def rule_of(request: Request) -> AccessRule:
    """The rule of the endpoint that serves a request."""
    method = "GET" if request.method == "HEAD" else request.method
    path = request.scope["route"].path_format
    return RULES.get((method, path), _HUB if path.startswith("/hf/") else _FOR_ADMINS)
