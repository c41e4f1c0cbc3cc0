"""ls, latest, runs: lists checkpoints and runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import inf, isfinite
from typing import Annotated, NoReturn

from ckptapi.bodies import CheckpointBody, RunBody
from ckptapi.listing import Bound, Filter, Sort, Tagged, in_order, is_glob
from ckptctl.commands.arguments import LocalOption, RunArgument, a_flag, an_option
from ckptctl.output import Output
from ckptctl.render import Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State, has_branches
from ckptstore.commits.labels import ARCHIVED
from ckptstore.errors import InvalidRequest

_ORDERS = {"time": "committed_at", "size": "stored_bytes"}
_MOST_ROWS = 1000
_LOOK_S = 2.0
LimitOption = Annotated[int | None, an_option("Show the first N.", "N", min=1)]
MetricOption = Annotated[list[str] | None, an_option("Only with this metric; also >=. Repeatable.", "NAME<=NUMBER")]
StepOption = Annotated[int | None, an_option("Limit the steps.", "STEP", min=0)]
MomentOption = Annotated[str | None, an_option("An age (24h, 7d) or a moment (2026-11-22T10:00:00Z).", "TIME")]
STATE_STYLES = dict.fromkeys(State, "dim") | {State.COMMITTED: "", State.CORRUPT: "red"}


def list_checkpoints(
    session: Session,
    run: RunArgument = None,
    limit: LimitOption = None,
    state: Annotated[list[State] | None, an_option("Only these states. Repeatable.")] = None,
    metric: MetricOption = None,
    tag: Annotated[list[str] | None, an_option("Only with this tag. Repeatable.", "NAME[=VALUE]")] = None,
    min_step: StepOption = None,
    max_step: StepOption = None,
    since: MomentOption = None,
    until: MomentOption = None,
    sort: Annotated[str, an_option("run, step, time, size, metric:NAME; - descends.", "ORDER")] = "run",
    local: LocalOption = None,
    watch: Annotated[bool, a_flag("Show the table again every 2 s.", "--watch", "-w")] = False,
) -> None:
    """List checkpoints by run, newest step first, or those that RUN@STEP names; without RUN and conditions, the runs.

    All conditions must hold. A time is an age such as 24h or 7d, or a moment such as 2026-11-22T10:00:00Z. --sort takes
    run, step, time, size or metric:NAME, with a minus sign for descending order. --limit counts for each run in the
    order by run, otherwise for all. With --local, a column names the stores that have each checkpoint: local, remote.
    """
    session.add_local_tier(local)
    now = session.clock()
    wanted = Filter(
        run=run and run.partition("@")[0],
        states=frozenset(state or ()),
        min_step=min_step,
        max_step=max_step,
        since=None if since is None else _moment(since, now),
        until=None if until is None else _moment(until, now),
        bounds=tuple(Bound.parse(text) for text in metric or ()),
        tags=tuple(Tagged.parse(text) for text in tag or ()),
    )
    if wanted == Filter() and sort == Sort.RUN and not (limit or local or watch):
        list_runs(session)
        return
    arrange = _arrangement(sort)
    none = "no checkpoint" if wanted == Filter(run=run) else "no checkpoint that meets all conditions"
    none = f"{none} in {session.source.url}"

    def look() -> tuple[list[Checkpoint], list[str]]:
        listed = session.checkpoints(run)
        found = {name: [c for c in checkpoints if wanted.admits(c)] for name, checkpoints in listed.items()}
        if sort != Sort.RUN:
            every = [c for checkpoints in found.values() for c in checkpoints]
            found = {"": arrange(every)} if every else {}
        return _first(found, limit, session.screen.output is Output.TABLE)

    if watch:
        _watch(session, look, none)
    shown, notes = look()
    for note in (*notes, *session.local_limits(dict.fromkeys(c.run for c in shown))):
        session.screen.note(note)
    table = checkpoint_table(shown, session.clock())
    session.screen.emit([CheckpointBody.of(c) for c in shown], [c.id for c in shown], [table], none=none)


def _watch(session: Session, look: Callable[[], tuple[list[Checkpoint], list[str]]], none: str) -> NoReturn:
    with session.screen.redrawing() as redraw:
        if redraw is None:
            raise InvalidRequest("--watch needs a terminal", "ckptctl watch prints a line for each commit")
        while True:
            shown, notes = look()
            redraw([checkpoint_table(shown, session.clock()), *notes] if shown else [none])
            time.sleep(_LOOK_S)


def _first(found: dict[str, list[Checkpoint]], limit: int | None, as_table: bool) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoints to show, and what to say about those left out."""
    shown: list[Checkpoint] = []
    notes = []
    for name, checkpoints in found.items():
        shown += checkpoints[:limit]
        if limit and len(checkpoints) > limit:
            of_run = f" of run {name}" if name else ""
            notes.append(f"{limit} of {human.count(len(checkpoints), 'checkpoint')}{of_run} shown")
    if as_table and limit is None and len(shown) > _MOST_ROWS:
        notes.append(f"{_MOST_ROWS:,} of {len(shown):,} checkpoints shown; --limit or -o json for more")
        shown = shown[:_MOST_ROWS]
    return shown, notes


def _arrangement(text: str) -> Callable[[list[Checkpoint]], list[Checkpoint]]:
    """The function that sorts as `text` requests. Raises InvalidRequest."""
    falling, name = text.startswith("-"), text.removeprefix("-")
    kind, _, metric = name.partition(":")
    if kind == "metric" and metric:

        def place(c: Checkpoint) -> tuple[bool, float]:
            value = c.metrics.get(metric, inf)
            return (False, -value if falling else value) if isfinite(value) else (True, 0.0)

        return lambda found: sorted(in_order(found, Sort.RUN), key=place)
    try:
        order = Sort(text[:falling] + _ORDERS.get(name, name))
    except ValueError:
        raise InvalidRequest(f"{text!r} is not an order", "Use run, step, time, size or metric:NAME") from None
    return partial(in_order, sort=order)


def _moment(text: str, now: float) -> float:
    """The moment of an age (24h) or of an RFC 3339 time, in seconds since the epoch. Raises InvalidRequest."""
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        pass
    try:
        return now - human.parse_duration(text)
    except InvalidRequest:
        raise InvalidRequest(f"{text!r} is not a time", "Write 90s, 30m, 24h, 7d or 2026-11-22T10:00:00Z") from None


def show_latest(session: Session, run: RunArgument = None, local: LocalOption = None) -> None:
    """Show the newest checkpoint of a run: the highest step of its newest generation.

    RUN may be left out if the store holds only one run.
    """
    session.add_local_tier(local)
    found = session.source.latest(run)
    session.screen.emit(CheckpointBody.of(found), [found.id], [checkpoint_facts(found, session.clock())])


def list_runs(session: Session, run: RunArgument = None, limit: LimitOption = None) -> None:
    """List runs with their checkpoints and sizes.

    Without RUN, those whose newest checkpoint has the tag `archived` are left out.
    """
    names = list(session.checkpoints(run)) if run and not is_glob(run) else session.run_names(run)
    if len(names) > (limit or len(names)):
        session.screen.note(f"{limit} of {len(names):,} runs shown")
    names = names[:limit]
    if session.target.is_daemon:
        runs = [one for one in session.daemon("runs").run_summaries() if one.run in names]
    else:
        runs = [_summary(session, name, session.source.checkpoints(name)) for name in names]
    if run is None and (old := [one for one in runs if one.latest and ARCHIVED in one.latest.tags]):
        session.screen.note(f"without {human.count(len(old), 'archived run')}; ckptctl runs '*' lists them")
        runs = [one for one in runs if one not in old]
    now = session.clock()
    table = Table(("RUN", ">CHECKPOINTS", ">STORED", "LATEST", ">AGE"), [_run_cells(run, now) for run in runs])
    names = [run.run for run in runs]
    session.screen.emit(runs, names, [table], none=f"no run in {session.source.url}")


def _summary(session: Session, run: str, found: Sequence[Checkpoint]) -> RunBody:
    """The summary of a run in a store. found: newest step first."""
    latest = next((c for c in found if c.state is State.COMMITTED), None)
    return RunBody(
        run=run,
        num_checkpoints=len(found),
        stored_bytes=sum(c.stored_bytes for c in found),
        latest=CheckpointBody.of(latest) if latest else None,
    )


def show_meant(session: Session, verb: str, found: Sequence[Checkpoint]) -> None:
    """Show which checkpoints a command would change."""
    session.screen.emit(
        [CheckpointBody.of(c) for c in found], [c.id for c in found], [f"would {verb} {c.id}" for c in found]
    )


def short_id(checkpoint: Checkpoint) -> str:
    """The shortest unambiguous id of a checkpoint."""
    if checkpoint.live:
        return f"{checkpoint.run}@{checkpoint.step}"
    return checkpoint.id


def checkpoint_table(checkpoints: Sequence[Checkpoint], now: float) -> Table:
    """A table of checkpoints."""
    headers = (
        "CHECKPOINT", "STATE", "WHERE?", "GENERATION/2?", ">AGE", ">SIZE", ">STORED/2", ">SAVED IN/3", ">RANKS/4",
        "METRICS/1", "TAGS/1?",
    )  # fmt: skip
    branches = has_branches(checkpoints)
    rows = [Row(_cells(c, c.branch if branches else "", now), STATE_STYLES[c.state]) for c in checkpoints]
    return Table(headers, rows)


def checkpoint_facts(c: Checkpoint, now: float) -> dict[str, str]:
    """All facts about one checkpoint from a listing."""
    age = human.age(now - c.committed_at)
    stored = f"{human.size(c.stored_bytes)} stored ({human.ratio(c.needed_bytes, c.raw_bytes)})"
    if c.referenced_bytes:
        stored = f"{human.size(c.referenced_bytes)} referenced, {stored}"
    entries, shards = human.count(c.num_entries, "entry"), human.count(c.num_shards, "shard")
    return {
        "checkpoint": c.id,
        "state": c.state,
        **({"where": ", ".join(c.tiers)} if c.tiers else {}),
        "generation": c.branch_state,
        "committed": f"{human.moment(c.committed_at)}, {age} ago; {human.duration(c.save_seconds)} after its capture",
        "size": f"{human.size(c.raw_bytes)}, {stored}",
        "holds": f"{entries} in {shards}, written by {human.count(c.world_size, 'rank')}",
        "metrics": human.metrics(c.metrics) or "none",
        "tags": human.tags(c.tags) or "none",
    }


def _cells(c: Checkpoint, branch: str, now: float) -> tuple[str, ...]:
    where = ", ".join(c.tiers)
    if c.state is State.CORRUPT:
        return (short_id(c), c.state, where, branch, "?", "?", "?", "?", "?", c.problem, "")
    return (
        short_id(c),
        c.state,
        where,
        branch,
        human.age(now - c.committed_at),
        human.size(c.raw_bytes),
        human.size(c.stored_bytes),
        human.duration(c.save_seconds),
        str(c.world_size),
        human.metrics(c.metrics),
        human.tags(c.tags),
    )


def _run_cells(run: RunBody, now: float) -> tuple[str, ...]:
    counts = (run.run, f"{run.num_checkpoints:,}", human.size(run.stored_bytes))
    if run.latest is None:
        return (*counts, "none", "")
    return (*counts, f"step {run.latest.step}", human.age(now - run.latest.committed_at))
