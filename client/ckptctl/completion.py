"""Shell completion for names of runs and checkpoints. On errors it offers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from ckptctl.output import Output
from ckptctl.render import Screen
from ckptctl.session import Session
from ckptctl.targets import global_options
from ckptstore.errors import CkptError
from ckptstore.reading.source import Source


def run_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs with this prefix."""
    return _offer(ctx, incomplete, lambda source: source.runs())


def checkpoint_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """RUN@latest of each run with this prefix; for a single run also its checkpoints."""

    def find(source: Source) -> list[str]:
        run, at, _ = incomplete.partition("@")
        runs = [run] if at else [name for name in source.runs() if name.startswith(run)]
        found = source.checkpoints(runs[0]) if len(runs) == 1 else []
        steps = [f"{c.run}@{c.step}" for c in found if c.live]
        return [*(f"{name}@latest" for name in runs), *steps]

    return _offer(ctx, incomplete, find)


def _offer(ctx: typer.Context, incomplete: str, find: Callable[[Source], Iterable[str]]) -> list[str]:
    session = Session(global_options(ctx).target, Screen(Output.ID, color=False, quiet=True))
    try:
        return [name for name in find(session.source) if name.startswith(incomplete)]
    except CkptError:
        return []
    finally:
        session.close()
