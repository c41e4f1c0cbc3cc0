"""Who may do what: one row per endpoint. An endpoint without a row is for admins only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from ckptapi import bodies
from ckptapi.bodies import Scope
from ckptd.http.context import Context
from ckptstore.names import Reference

Naming = Callable[[Request], Awaitable[str | None]]
"""Finds the run that a request is about; None: all runs."""

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
    context: Context = request.app.state.context
    restore = await context.threads.index(context.services.restores.find, request.path_params["id"])
    return restore.run


async def of_job(request: Request) -> str | None:
    """/v1/jobs/{id}"""
    context: Context = request.app.state.context
    job = await context.threads.index(context.services.jobs.find, request.path_params["id"])
    checkpoint: Any = job.request.get("checkpoint")
    run: Any = Reference.parse(checkpoint).run if checkpoint else job.request.get("run")
    return str(run) if run else None


async def in_body(_: Request) -> str | None:
    """{"run": …}, {"id": …} or {"checkpoint": …}: ckptd.http.access.check_body looks at it when it has been read."""
    return None


@dataclass(frozen=True, slots=True)
class Rule:
    """What an endpoint asks of its caller."""

    scope: Scope | None
    """None: nothing, not even a token."""
    run: Naming | None = None
    """None: it is about all runs, and not for callers bound to some."""
    filters: bool = False
    """Where no single run is named, it answers with what the caller may see."""


RULES: dict[tuple[str, str], Rule] = {
    ("GET", "/livez"): Rule(None),
    ("GET", "/readyz"): Rule(None),
    ("GET", "/metrics"): Rule(Scope.READ),
    ("GET", "/checkpoints/latest"): Rule(Scope.READ, in_query),
    ("GET", bodies.LATEST): Rule(Scope.READ, in_query),
    ("GET", bodies.CHECKPOINTS): Rule(Scope.READ, in_query, filters=True),
    ("GET", bodies.RUNS): Rule(Scope.READ, in_query, filters=True),
    ("GET", _ONE): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/shards"): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/entries"): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/events"): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/manifest"): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/receipts/{rank}"): Rule(Scope.READ, of_checkpoint),
    ("GET", _ONE + "/shards/{name}"): Rule(Scope.READ, of_checkpoint),
    ("PATCH", _ONE): Rule(Scope.WRITE, of_checkpoint),
    ("DELETE", _ONE): Rule(Scope.PRUNE, of_checkpoint),
    ("POST", _ONE + "/undelete"): Rule(Scope.PRUNE, of_checkpoint),
    ("PUT", _ONE + "/pins/{name}"): Rule(Scope.PRUNE, of_checkpoint),
    ("DELETE", _ONE + "/pins/{name}"): Rule(Scope.PRUNE, of_checkpoint),
    ("GET", bodies.PINS): Rule(Scope.READ, in_query),
    ("GET", bodies.DELETED): Rule(Scope.READ, in_query),
    ("GET", bodies.AUDIT): Rule(Scope.READ, in_query),
    ("GET", bodies.POLICIES): Rule(Scope.READ),
    ("GET", bodies.POLICIES + "/history"): Rule(Scope.READ),
    ("PUT", bodies.POLICIES): Rule(Scope.ADMIN),
    ("POST", bodies.NOTIFY): Rule(Scope.WRITE, in_body),
    ("POST", bodies.DECISIONS): Rule(Scope.WRITE, in_body),
    ("POST", bodies.PRUNE): Rule(Scope.PRUNE, in_body),
    ("POST", bodies.REINDEX): Rule(Scope.ADMIN),
    ("POST", bodies.LEASES): Rule(Scope.READ, in_body),
    ("DELETE", bodies.LEASES + "/{run}/{lease}"): Rule(Scope.READ, in_path),
    ("POST", bodies.RESTORES): Rule(Scope.READ, in_body),
    ("GET", bodies.RESTORES): Rule(Scope.READ, in_query),
    ("GET", bodies.RESTORES + "/{id}"): Rule(Scope.READ, of_restore),
    ("PUT", bodies.RESTORES + "/{id}/ranks/{rank}"): Rule(Scope.READ, of_restore),
    ("DELETE", bodies.RESTORES + "/{id}"): Rule(Scope.READ, of_restore),
    ("GET", bodies.EVENTS): Rule(Scope.READ, in_query),
    ("GET", bodies.ATTEMPTS): Rule(Scope.READ, in_query),
    ("POST", bodies.JOBS): Rule(Scope.READ, in_body),  # and what its kind asks for
    ("GET", bodies.JOBS): Rule(Scope.READ),
    ("GET", bodies.JOBS + "/{id}"): Rule(Scope.READ, of_job),
    ("DELETE", bodies.JOBS + "/{id}"): Rule(Scope.PRUNE, of_job),
    ("POST", bodies.PROBE): Rule(Scope.ADMIN),
    ("GET", bodies.TOKENS): Rule(Scope.ADMIN),
    ("POST", bodies.TOKENS): Rule(Scope.ADMIN),
    ("POST", bodies.TOKENS + "/{name}/rotate"): Rule(Scope.ADMIN),
    ("DELETE", bodies.TOKENS + "/{name}"): Rule(Scope.ADMIN),
    # Pages
    ("GET", "/"): Rule(Scope.READ, filters=True),
    ("GET", "/runs/{run}"): Rule(Scope.READ, in_path),
    ("GET", "/checkpoints/{id}"): Rule(Scope.READ, of_checkpoint),
    ("GET", "/attempts"): Rule(Scope.READ, in_query, filters=True),
    ("GET", "/restores"): Rule(Scope.READ, in_query, filters=True),
    ("GET", "/restores/{id}"): Rule(Scope.READ, of_restore),
    ("GET", "/jobs"): Rule(Scope.READ),
    ("GET", "/jobs/{id}"): Rule(Scope.READ, of_job),
    ("GET", "/store"): Rule(Scope.READ),
    ("POST", "/store"): Rule(Scope.ADMIN),
}
JOBS: dict[type[Any], Scope] = {
    bodies.VerifyJob: Scope.READ,
    bodies.CollectJob: Scope.PRUNE,
}
"""What starting a job of a kind asks for; other kinds are for admins."""
_FOR_ADMINS = Rule(Scope.ADMIN)


def rule_of(request: Request) -> Rule:
    """The row of the endpoint that a request leads to."""
    method = "GET" if request.method == "HEAD" else request.method
    return RULES.get((method, request.scope["route"].path), _FOR_ADMINS)
