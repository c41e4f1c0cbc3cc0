"""restores: shows or follows the restore sessions of a daemon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated

from ckptapi.bodies import Phase, RestoreBody, RestoreState
from ckptctl.commands.arguments import NewestOption, a_flag, an_argument
from ckptctl.commands.listing import short_id
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.names import is_ulid

_STYLES = {
    RestoreState.RESTORING: "",
    RestoreState.RESTORED: "green",
    RestoreState.FAILED: "red",
    RestoreState.EXPIRED: "red",
    RestoreState.CANCELLED: "dim",
}
_LOOK_S = 0.5


def show_restores(
    session: Session,
    which: Annotated[
        str | None, an_argument("The sessions of a run, or one session with its ranks.", "RUN|RESTORE")
    ] = None,
    limit: NewestOption = 20,
    watch: Annotated[bool, a_flag("Follow the sessions until they have ended.", "--watch", "-w")] = False,
) -> None:
    """Show restore sessions: their progress, and the ranks that are behind.

    If stdout is not a terminal, --watch prints a line for each change.
    """
    daemon = session.daemon("restores")
    id, run = (which, None) if which is not None and is_ulid(which) else (None, which)

    def look() -> list[RestoreBody]:
        return [daemon.restore_session(id)] if id is not None else daemon.restore_sessions(run, limit)

    def blocks(found: Sequence[RestoreBody]) -> Iterable[Block]:
        now = session.clock()
        if id is not None:
            return _restore_blocks(found[0], now)
        columns = ("RESTORE", "CHECKPOINT", "STATE", ">RANKS", ">DONE/2", ">AGE/1", "HOST/3", "SLOWEST, OR PROBLEM")
        return [Table(columns, [Row(_cells(restore, now), _STYLES[restore.state]) for restore in found])]

    if watch:
        _watch(session, look, blocks)
        return
    found = look()
    body = found if id is None else found[0]
    ids, none = [restore.id for restore in found], f"no restores at {session.source.url}"
    session.screen.emit(body, ids, blocks(found), none=none)


def _watch(
    session: Session, look: Callable[[], list[RestoreBody]], blocks: Callable[[list[RestoreBody]], Iterable[Block]]
) -> None:
    shown: dict[str, str] = {}
    with session.screen.redrawing() as redraw:
        while True:
            found = look()
            if redraw is not None:
                redraw(blocks(found))
            else:
                for restore in reversed(found):
                    line = _line(restore)
                    if shown.get(restore.id) != line:
                        session.screen.emit(restore, [restore.id], [line])
                    shown[restore.id] = line
            if all(restore.state is not RestoreState.RESTORING for restore in found):
                return
            time.sleep(_LOOK_S)


def _cells(restore: RestoreBody, now: float) -> tuple[str, ...]:
    return (
        restore.id,
        short_id(restore.checkpoint.checkpoint()),
        restore.state,
        f"{restore.num_restored}/{restore.world_size}",
        _done(restore),
        human.age(now - restore.created_at),
        restore.host or "-",
        restore.problem or _slowest(restore),
    )


def _line(restore: RestoreBody) -> str:
    """One session as one line, without values that change with time."""
    checkpoint = short_id(restore.checkpoint.checkpoint())
    ranks = f"{restore.num_restored}/{human.count(restore.world_size, 'rank')}"
    parts = (restore.id, checkpoint, restore.state, ranks, _done(restore), restore.problem or _slowest(restore))
    return "  ".join(part for part in parts if part)


def _restore_blocks(restore: RestoreBody, now: float) -> Iterator[Block]:
    joined = human.count(restore.world_size, "rank")
    facts: dict[str, str] = {
        "restore": restore.id,
        "job": restore.key,
        "checkpoint": restore.checkpoint.id,
        "state": restore.state,
        "ranks": f"{restore.num_restored} restored, {restore.num_joined} joined, of {joined}",
        "bytes": f"{human.size(restore.done_bytes)} of {human.size(restore.total_bytes)}",
        "began": f"{human.moment(restore.created_at)}, {human.age(now - restore.created_at)} ago",
    }
    if restore.host:
        facts["host"] = restore.host
    if restore.ended_at is not None:
        facts["took"] = human.duration(restore.ended_at - restore.created_at)
    if restore.expires_at is not None:
        facts["expires"] = f"in {human.age(restore.expires_at - now)} unless the ranks report"
    if restore.problem:
        facts["problem"] = restore.problem
    if restore.stragglers:
        facts["behind"] = f"rank {', '.join(map(str, restore.stragglers))}"
    yield facts
    if restore.ranks:
        yield ""
        columns = (">RANK", "PHASE", ">DONE", ">BYTES/2", ">OF/2", ">REPORTED/1", "PROBLEM")
        rows = [
            Row(
                (
                    str(rank.rank),
                    rank.phase,
                    f"{rank.fraction:.0%}",
                    human.size(rank.done_bytes),
                    human.size(rank.total_bytes) if rank.total_bytes else "?",
                    human.age(now - rank.updated_at),
                    rank.problem,
                ),
                "yellow" if rank.rank in restore.stragglers else "",
            )
            for rank in sorted(restore.ranks, key=lambda one: (one.phase is not Phase.FAILED, one.fraction, one.rank))
        ]
        yield Table(columns, rows)


def _done(restore: RestoreBody) -> str:
    if restore.state is RestoreState.RESTORED:
        return "100%"
    return f"{restore.progress:.0%}" if restore.progress is not None else ""


def _slowest(restore: RestoreBody) -> str:
    """The slowest ranks of a live session."""
    if restore.slowest is None:
        return ""
    absent = restore.world_size - restore.num_joined
    to_join = f"; {human.count(absent, 'rank')} still to join" if absent else ""
    return f"rank {restore.slowest.rank} ({restore.slowest.phase}, {restore.slowest.fraction:.0%}){to_join}"
