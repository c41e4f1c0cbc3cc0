"""healthcheck: whether the daemon or the store responds, for scripts and containers."""

from __future__ import annotations

import msgspec
import typer

from ckptctl.session import Session
from ckptstore.errors import DaemonUnavailable


class HealthBody(msgspec.Struct, frozen=True):
    """A target that responds, as JSON."""

    target: str
    ready: bool


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("healthcheck")(healthcheck)


def healthcheck(ctx: typer.Context) -> None:
    """Exit with 0 if the daemon is ready, or the store can be listed; with 7 if not.

    Needs no token. Writes nothing to the store; ckptctl probe tests what it guarantees.
    """
    session: Session = ctx.obj
    session.dispatch(lambda: _ask_daemon(session), lambda: _list_store(session))
    target = session.target.url
    session.screen.emit(HealthBody(target, ready=True), [target], [f"{target} is ready"])


def _ask_daemon(session: Session) -> None:
    ready = session.daemon("healthcheck").readiness()
    if not ready.ready:
        states = {"database": ready.database, "store": ready.store}
        wrong = [f"{part}: {state}" for part, state in states.items() if state != "ok"]
        raise DaemonUnavailable(
            f"ckptd at {session.target.url} is not ready: {'; '.join(wrong) or 'it is shutting down'}",
            "ckptctl doctor has advice",
        )


def _list_store(session: Session) -> None:
    session.source.runs()
