"""ls, latest, runs: lists checkpoints and runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import compress
from typing import Annotated

import typer

from ckptapi.bodies import CheckpointBody, RunBody
from ckptctl.commands.arguments import RunOption
from ckptctl.render import Block, Facts, Row, Table, TableColumn
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State, has_branches

STATE_STYLES = {State.COMMITTED: "", State.SUPERSEDED: "dim", State.ABANDONED: "dim", State.CORRUPT: "red"}


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command("ls")(list_checkpoints)
    app.command("latest")(show_latest)
    app.command("runs")(list_runs)


def list_checkpoints(
    ctx: typer.Context,
    run: RunOption = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show the newest N of each run.", show_default=False)
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="NAME[=VALUE]", help="Only checkpoints with this tag.", show_default=False)
    ] = None,
) -> None:
    """List checkpoints by run, newest step first."""
    session: Session = ctx.obj
    shown: list[Checkpoint] = []
    for name, listed in session.checkpoints(run).items():
        found = [c for c in listed if tag is None or _is_tagged(c, tag)]
        shown += found[:limit]
        if len(found) > len(found[:limit]):
            session.screen.note(f"{len(found[:limit])} of {human.count(len(found), 'checkpoint')} of run {name} shown")
    if not shown:
        session.screen.note(f"no checkpoint in {session.source.url}")
    bodies = [CheckpointBody.of(c) for c in shown]
    session.screen.emit(bodies, [c.id for c in shown], [checkpoint_table(shown, session.clock())] if shown else [])


def show_latest(ctx: typer.Context, run: RunOption = None) -> None:
    """Show the newest checkpoint.

    With --run, the one with the highest step; otherwise the one that was committed last.
    """
    session: Session = ctx.obj
    found = session.source.latest(run)
    session.screen.emit(CheckpointBody.of(found), [found.id], [checkpoint_facts(found, session.clock())])


def list_runs(ctx: typer.Context) -> None:
    """List runs with their checkpoints and sizes."""
    session: Session = ctx.obj
    runs = session.dispatch(
        lambda: session.daemon("runs").run_summaries(),
        lambda: [summarize_run(name, found) for name, found in session.checkpoints(None).items()],
    )
    if not runs:
        session.screen.note(f"no run in {session.source.url}")
    session.screen.emit(runs, [run.run for run in runs], _run_blocks(runs, session.clock()))


def summarize_run(run: str, checkpoints: Iterable[Checkpoint]) -> RunBody:
    """The summary of a run. checkpoints: newest step first."""
    found = list(checkpoints)
    latest = next((c for c in found if c.state is State.COMMITTED), None)
    return RunBody(
        run=run,
        num_checkpoints=len(found),
        stored_bytes=sum(c.stored_bytes for c in found),
        latest=CheckpointBody.of(latest) if latest else None,
    )


def short_id(checkpoint: Checkpoint) -> str:
    """The shortest unambiguous id of a checkpoint."""
    if checkpoint.state is State.COMMITTED:
        return f"{checkpoint.run}@{checkpoint.step}"
    return checkpoint.id


def checkpoint_table(checkpoints: Iterable[Checkpoint], now: float) -> Table:
    """A table of checkpoints."""
    columns = [
        TableColumn("CHECKPOINT"),
        TableColumn("STATE"),
        TableColumn("GENERATION", drop=2),
        TableColumn("AGE", right=True),
        TableColumn("SIZE", right=True),
        TableColumn("STORED", right=True, drop=2),
        TableColumn("SAVED IN", right=True, drop=3),
        TableColumn("RANKS", right=True, drop=4),
        TableColumn("METRICS", drop=1),
        TableColumn("TAGS", drop=1),
    ]
    found = list(checkpoints)
    tagged, branched = any(c.tags for c in found), has_branches(found)
    shown = [tagged if c.header == "TAGS" else branched if c.header == "GENERATION" else True for c in columns]
    rows = [Row(tuple(compress(_cells(c, now), shown)), STATE_STYLES[c.state]) for c in found]
    return Table(tuple(compress(columns, shown)), rows)


def checkpoint_facts(checkpoint: Checkpoint, now: float) -> Facts:
    """All facts about one checkpoint from a listing."""
    c = checkpoint
    age = human.age(now - c.committed_at)
    stored = f"{human.size(c.stored_bytes)} stored ({human.ratio(c.needed_bytes, c.raw_bytes)})"
    if c.referenced_bytes:
        stored = f"{human.size(c.referenced_bytes)} referenced, {stored}"
    entries, shards = human.count(c.num_entries, "entry"), human.count(c.num_shards, "shard")
    pairs = [
        ("checkpoint", c.id),
        ("state", c.state),
        ("generation", c.branch_state),
        ("committed", f"{human.moment(c.committed_at)}, {age} ago; {human.duration(c.save_seconds)} after its capture"),
        ("size", f"{human.size(c.raw_bytes)}, {stored}"),
        ("holds", f"{entries} in {shards}, written by {human.count(c.world_size, 'rank')}"),
        ("metrics", human.metrics(c.metrics) or "none"),
        ("tags", human.tags(c.tags) or "none"),
    ]
    return Facts(pairs)


def _is_tagged(checkpoint: Checkpoint, tag: str) -> bool:
    name, equals, value = tag.partition("=")
    found = checkpoint.tags.get(name)
    return found is not None and (found == value or not equals)


def _cells(c: Checkpoint, now: float) -> tuple[str, ...]:
    if c.state is State.CORRUPT:
        return (short_id(c), c.state, c.branch, "?", "?", "?", "?", "?", c.problem, "")
    return (
        short_id(c),
        c.state,
        c.branch,
        human.age(now - c.committed_at),
        human.size(c.raw_bytes),
        human.size(c.stored_bytes),
        human.duration(c.save_seconds),
        str(c.world_size),
        human.metrics(c.metrics),
        human.tags(c.tags),
    )


def _run_blocks(runs: Iterable[RunBody], now: float) -> Iterator[Block]:
    columns = (
        TableColumn("RUN"),
        TableColumn("CHECKPOINTS", right=True),
        TableColumn("STORED", right=True),
        TableColumn("LATEST"),
        TableColumn("AGE", right=True),
    )
    rows = [Row(_run_cells(run, now)) for run in runs]
    if rows:
        yield Table(columns, rows)


def _run_cells(run: RunBody, now: float) -> tuple[str, ...]:
    counts = (run.run, f"{run.num_checkpoints:,}", human.size(run.stored_bytes))
    if run.latest is None:
        return (*counts, "none", "")
    return (*counts, f"step {run.latest.step}", human.age(now - run.latest.committed_at))
