"""du: what the bytes of runs, or of one checkpoint, belong to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated

from ckptapi.listing import is_glob
from ckptctl.commands.arguments import a_checkpoint, an_option
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import NoCheckpoint
from ckptstore.format.planning import entry_bytes
from ckptstore.reading.source import read_manifest
from ckptstore.retention.deletion import measure_waste
from ckptstore.run import Run
from ckptstore.values import Record

DELETED, UNFINISHED = "deleted", "unfinished"


class UsageBody(Record):
    """The storage use of the checkpoints of a run in one state, as JSON; or deletions, or saves that did not finish."""

    run: str
    state: str
    checkpoints: int | None
    raw_bytes: int | None
    """Bytes of their tensors."""
    stored_bytes: int
    """Bytes in their own files."""


class PartBody(Record):
    """One part of a checkpoint's state, as JSON."""

    part: str
    entries: int
    raw_bytes: int


def show_usage(
    session: Session,
    which: Annotated[str | None, a_checkpoint("A run, with * and ? as wildcards, or one checkpoint.")] = None,
    depth: Annotated[int, an_option("Segments of the names of parts.", "N", "--depth", "-d", min=1, max=64)] = 1,
) -> None:
    """Show what the bytes of runs belong to, by state; or those of one checkpoint, by part of its state.

    SIZE counts the tensors, STORED the files. On a store (--store), data that waits for its deletion and data of saves
    that did not finish are measured as well; ckptctl gc removes what is due.
    """
    if which is not None and "@" in which:
        _show_parts(session, which, depth)
        return
    found = _usages(session, which)
    runs = dict.fromkeys(body.run for body in found)
    session.screen.emit(found, runs, _usage_blocks(found), none=f"no run in {session.source.url}")


def _show_parts(session: Session, which: str, depth: int) -> None:
    checkpoint = session.find_readable(which)
    bodies = _parts(entry_bytes(read_manifest(session.source, checkpoint).content), depth)
    total = sum(body.raw_bytes for body in bodies)
    rows = [
        (body.part, f"{body.entries:,}", human.size(body.raw_bytes), human.ratio(body.raw_bytes, total))
        for body in bodies
    ]
    table, none = Table(("PART", ">ENTRIES", ">SIZE", ">SHARE"), rows), f"{checkpoint.id} has no tensors"
    session.screen.emit(bodies, [body.part for body in bodies], [table], none=none)


def _parts(sizes: Mapping[str, int], depth: int) -> list[PartBody]:
    """The parts of a state, the largest first. A part is named by the first segments of its entries: model, optim."""
    found = defaultdict[str, list[int]](list)
    for name, size in sizes.items():
        found["/".join(name.split("/")[:depth])].append(size)
    bodies = [PartBody(part=part, entries=len(of), raw_bytes=sum(of)) for part, of in found.items()]
    return sorted(bodies, key=lambda body: (-body.raw_bytes, body.part))


def _usages(session: Session, which: str | None) -> list[UsageBody]:
    try:
        listed = session.checkpoints(which)
    except NoCheckpoint:
        # The data of a run stays for a while after its last checkpoint was deleted.
        left = [] if which is None or is_glob(which) else list(_usage(session, which, ()))
        if not left:
            raise
        return left
    return [body for run, checkpoints in listed.items() for body in _usage(session, run, checkpoints)]


def _usage(session: Session, run: str, listed: Iterable[Checkpoint]) -> Iterator[UsageBody]:
    by_state = defaultdict[str, list[Checkpoint]](list)
    for checkpoint in listed:
        by_state[checkpoint.state].append(checkpoint)
    for state, found in by_state.items():
        yield UsageBody(
            run=run,
            state=state,
            checkpoints=len(found),
            raw_bytes=sum(c.raw_bytes for c in found),
            stored_bytes=sum(c.stored_bytes for c in found),
        )
    if not session.target.is_daemon:
        waste = measure_waste(Run(session.store("du"), run, session.clock))
        for state, size in ((DELETED, waste.tombstoned), (UNFINISHED, waste.orphans)):
            if size:
                yield UsageBody(run=run, state=state, checkpoints=None, raw_bytes=None, stored_bytes=size)


def _usage_blocks(found: Sequence[UsageBody]) -> Iterator[Block]:
    columns = ("RUN", "STATE", ">CHECKPOINTS", ">SIZE/1", ">STORED", ">SHARE")
    total = sum(body.stored_bytes for body in found)
    rows = [
        (
            body.run,
            body.state,
            "" if body.checkpoints is None else f"{body.checkpoints:,}",
            "" if body.raw_bytes is None else human.size(body.raw_bytes),
            human.size(body.stored_bytes),
            human.ratio(body.stored_bytes, total),
        )
        for body in found
    ]
    if rows:
        yield Table(columns, [*rows, Row(("total", "", "", "", human.size(total), ""), "bold")])
