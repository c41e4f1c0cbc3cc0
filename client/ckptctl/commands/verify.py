"""verify: checks every byte against its checksum. scrub: the same at rest, the longest unverified first, recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Annotated, Any

from ckptapi.bodies import HealJob, VerifyJob
from ckptctl.commands.arguments import ChosenArgument, a_flag, an_option
from ckptctl.commands.fleet import in_units
from ckptctl.commands.jobs import job_blocks
from ckptctl.commands.listing import short_id
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.audit import operator
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CorruptObject, InvalidRequest, NoCheckpoint
from ckptstore.reading.restore_check import MAX_RANKS
from ckptstore.reading.verify import Verification
from ckptstore.reading.verify import verify as verify_checkpoint
from ckptstore.retention.scrubbing import due_for_scrub, rate_limiter, scrub
from ckptstore.run import Run
from ckptstore.stores import open_store


def _choose(session: Session, which: Sequence[str] | None, **_: Any) -> list[Checkpoint]:
    if not which:
        raise InvalidRequest("nothing to verify is given", "Give RUN@STEP, RUN for all of a run, or '*' for all runs")
    return [c for text in which for c in session.chosen(text)]


@in_units("which", _choose)
def verify(
    session: Session,
    which: ChosenArgument = None,
    ranks: Annotated[
        list[int] | None,
        an_option(
            "Prove that they restore on N ranks, and estimate the time. May be repeated.", "N", min=1, max=MAX_RANKS
        ),
    ] = None,
) -> None:
    """Read checkpoints completely and verify all checksums.

    Continues after a problem and lists all of them. With -o id it prints the damaged checkpoints.
    With --ranks, it plans the restore of every rank, cut along the first dimension as FSDP2 does, restores up to
    256 MiB into memory at full speed, and decodes everything else. The number of ranks that saved is always included.
    ALONE is the time of a restore if each rank reads as fast as this program did. TOGETHER is the time if all ranks
    share this speed, on one host or at the limit of the store.
    """
    session.operator.read_past_caches()  # bytes from a cache prove nothing about the store
    chosen = _choose(session, which)
    results: list[Verification] = []
    with session.screen.progress("verifying", sum(c.needed_bytes for c in chosen)) as progress:
        for checkpoint in chosen:
            corrupt = checkpoint.state is State.CORRUPT
            try:
                # Without a lease, a concurrent prune would look like damage.
                with nullcontext() if corrupt else session.leased(checkpoint):
                    results.append(verify_checkpoint(session.source, checkpoint, progress, ranks=ranks))
            except NoCheckpoint:
                if len(chosen) == 1:
                    raise
                session.screen.note(f"{checkpoint.id} was deleted in the meantime")
    _report(session, results, "Restores skip them. Restore the bytes from a copy, or delete the checkpoints")


def _report(session: Session, results: Sequence[Verification], hint: str) -> None:
    damaged = [result.checkpoint.id for result in results if not result.ok]
    session.screen.emit(list(map(_body, results)), damaged, _blocks(results))
    _raise_if_damaged(len(damaged), len(results), hint)


def _body(result: Verification) -> dict[str, object]:
    """A result as JSON; `healed`: keys of the objects that were written again."""
    names = ("ok", "num_chunks", "stored_bytes", "problems", "healed", "estimates")
    return {"id": result.checkpoint.id, **{name: getattr(result, name) for name in names}}


def _raise_if_damaged(num_damaged: int, num_checked: int, hint: str) -> None:
    if num_damaged:
        raise CorruptObject(f"{num_damaged} of {human.count(num_checked, 'checkpoint')} damaged", hint)


def _blocks(results: Sequence[Verification]) -> Iterator[Block]:
    rows = [
        Row(
            (
                short_id(r.checkpoint),
                f"{r.num_chunks:,}",
                human.size(r.stored_bytes),
                "ok" if r.ok else human.count(len(r.problems), "problem"),
            ),
            "" if r.ok else "red",
        )
        for r in results
    ]
    yield Table(("CHECKPOINT", ">CHUNKS", ">STORED", "RESULT"), rows)
    for result in results:
        if not result.ok or result.healed:
            yield ""
            yield f"{result.checkpoint.id}:"
            yield from (f"  healed {key}" for key in result.healed)
            yield from (f"  {problem}" for problem in result.problems)
    for result in results:
        if result.estimates:
            yield ""
            yield f"{result.checkpoint.id} restores:"
            restores = [
                (
                    f"{one.ranks:,}",
                    human.size(one.busiest_bytes),
                    human.size(one.read_bytes),
                    _duration(one.restore_s),
                    _duration(one.shared_s),
                )
                for one in result.estimates
            ]
            yield Table((">RANKS", ">BUSIEST READS", ">ALL READ/1", ">ALONE", ">TOGETHER"), restores)


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else human.duration(seconds)


def _due(
    session: Session, which: list[str] | None, older: str | None, limit: int | None, heal: bool, **_: Any
) -> list[Checkpoint]:
    named = [checkpoint for text in which or () if "@" in text for checkpoint in session.chosen(text)]
    before = session.clock() - human.parse_duration(older) if older else float("inf")
    texts: Sequence[str | None] = which or [None]
    names = dict.fromkeys(name for text in texts if text is None or "@" not in text for name in session.run_names(text))
    runs = [Run(session.store("scrub"), name, session.clock) for name in names]
    return [*named, *due_for_scrub(runs, before, damaged=heal)][:limit]


@in_units("which", _due, older=None, limit=None)
def scrub_checkpoints(
    session: Session,
    which: ChosenArgument = None,
    older: Annotated[str | None, an_option("Only checkpoints not verified for this time: 12h, 30d.", "TIME")] = None,
    limit: Annotated[int | None, an_option("Stop after N checkpoints.", "N", min=1)] = None,
    heal: Annotated[
        bool, a_flag("Write damaged objects again, from other holders of the same bytes.", "--heal")
    ] = False,
    copy: Annotated[
        str | None, an_option("With --heal: a copy of the store to take bytes from.", "STORE", "--from")
    ] = None,
    rate: Annotated[str | None, an_option("Maximum bytes per second: 50MB, 1GiB.", "SIZE")] = None,
) -> None:
    """Read checkpoints completely, verify them, and record the results.

    Starts with checkpoints that were never verified, then the oldest results. It can be interrupted at any time and
    continues from there. A damaged checkpoint is listed as corrupt from then on, and restores skip it. The last
    checkpoint that was verified without errors is never deleted by a policy.
    With --heal, damaged checkpoints are read as well. A damaged object is written again if all its bytes are found in
    other checkpoints of the run or in the copy; then the checkpoint is verified once more.
    A daemon scrubs in a job: one checkpoint, a run or all checkpoints, at full speed.
    """
    if copy is not None and not heal:
        raise InvalidRequest("--from is given without --heal", "Add --heal")
    if session.target.is_daemon:
        one = which[0] if which else None
        named: dict[str, Any] = {"checkpoint" if one is not None and "@" in one else "run": one}
        if len(which or ()) > 1 or {older, limit, rate, copy} != {None}:
            raise InvalidRequest(
                "several runs, --older, --limit, --rate and --from work on stores only",
                "For a daemon, use ckptd --scrub-days",
            )
        job = session.daemon("scrub").run_job(
            HealJob(**named) if heal else VerifyJob(**named),
            lambda job: session.screen.note(
                f"job {job.id} continues if you interrupt this command; cancel it with ckptctl jobs {job.id} --cancel"
            ),
        )
        result = job.result or {}
        session.screen.emit(job, result.get("corrupt", []), job_blocks(job, session.clock()))
        _raise_if_damaged(result.get("num_corrupt", 0), result.get("checked", 0), _QUARANTINED)
        return
    due = _due(session, which, older, limit, heal)
    throttle = rate_limiter(human.parse_size(rate) if rate else 0, session.clock)
    heal_from = ([] if copy is None else [open_store(copy)]) if heal else None
    with session.screen.progress("scrubbing", sum(checkpoint.needed_bytes for checkpoint in due)) as progress:
        store = session.store("scrub")
        results = list(scrub(store, due, operator(), session.clock, progress, throttle, heal_from=heal_from))
    if not results:
        session.screen.note("no checkpoint is due")
    _report(session, results, _QUARANTINED)


_QUARANTINED = "They are now listed as corrupt. Try ckptctl scrub --heal, with --from if there is a copy, or ckptctl rm"
