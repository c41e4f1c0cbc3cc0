"""rm, undelete, gc: delete and undelete single checkpoints, and collect garbage. audit: who did it, when and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from ckptapi.bodies import MAX_PAGE, CheckpointBody
from ckptctl.commands.arguments import (
    DryRunOption,
    ReasonOption,
    RunArgument,
    YesOption,
    a_checkpoint,
    a_flag,
    an_argument,
    an_option,
)
from ckptctl.commands.listing import short_id, show_meant
from ckptctl.render import Block, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import Conflict, InvalidRequest, NoCheckpoint, PartlyDone
from ckptstore.names import Reference
from ckptstore.retention.deletion import UNDELETED, CollectReport


def remove(
    session: Session,
    checkpoints: Annotated[
        list[str],
        a_checkpoint("One or more checkpoints, or runs with --all; * and ? are wildcards: 'gpt@1*'.", "RUN@STEP|RUN"),
    ],
    grace: Annotated[str, an_option("Time until their data is deleted; undelete works until then.", "TIME")] = "24h",
    reason: ReasonOption = "",
    everything: Annotated[bool, a_flag("Delete all checkpoints of the runs.", "--all")] = False,
    dry_run: DryRunOption = False,
    force: Annotated[bool, a_flag("Delete even the newest checkpoint of a run.", "--force")] = False,
    yes: YesOption = False,
) -> None:
    """Delete checkpoints, even if a policy keeps them.

    They disappear from listings immediately and are deleted after the grace period. Refused while a checkpoint is
    pinned or being read, and for the newest checkpoint of a run without --force or --all. If any of them does not
    exist, none is deleted; if some are refused, the others are deleted and the exit code is 3. --all asks for the name
    of the run.
    """
    grace_s = human.parse_duration(grace)
    found = list({c.id: c for text in checkpoints for c in _meant(session, text, everything)}.values())
    if dry_run:
        show_meant(session, "delete", found)
        return
    if not yes:
        what, typed = ", ".join(c.id for c in found), ""
        if everything:  # of a run, whose name a person must type
            what, typed = f"all {human.count(len(found), 'checkpoint')} of {checkpoints[0]}", checkpoints[0]
        session.screen.confirm(f"Delete {what}, {human.size(sum(c.stored_bytes for c in found))}?", typed)
    done: list[Checkpoint] = []
    refused: list[Conflict] = []
    for checkpoint in found:
        try:
            session.operator.delete(checkpoint, grace_s, reason or "rm", force or everything)
            done.append(checkpoint)
        except NoCheckpoint:  # a policy was faster
            continue
        except Conflict as error:
            refused.append(error)
    after = f"; ckptctl undelete restores it for {human.duration(grace_s)}" if grace_s else ""
    bodies = [CheckpointBody.of(c) for c in done]
    if done:
        body = bodies if len(checkpoints) > 1 else bodies[0]
        session.screen.emit(body, [c.id for c in done], [f"deleted {c.id}{after}" for c in done])
    elif refused:
        raise refused[0]
    if refused:
        raise PartlyDone("; ".join(error.message for error in refused), refused[0].hint)


def _meant(session: Session, text: str, everything: bool) -> list[Checkpoint]:
    """The checkpoints that one argument names, newest first, as those that reference others must go before these.

    Raises NoCheckpoint, or InvalidRequest for a run without --all.
    """
    run, at, _ = text.partition("@")
    if everything == bool(at):
        raise InvalidRequest(
            f"{text!r} names {'single checkpoints' if at else 'a run'}",
            f"Use ckptctl rm {run}@STEP, ckptctl rm {run} --all, or ckptctl prune {run} --keep N",
        )
    return session.chosen(text)


def undelete(
    session: Session,
    checkpoint: Annotated[
        str | None,
        an_argument(
            "The checkpoint. Otherwise the deletions of runs are listed; * and ? are wildcards.", "RUN@STEP|RUN"
        ),
    ] = None,
    reason: ReasonOption = "",
) -> None:
    """Undo a deletion during its grace period. Without RUN@STEP: list the deletions that can be undone.

    The checkpoint is listed again, unchanged. It is pinned as "undeleted", so that the policy which deleted it does not
    delete it again; ckptctl pin RUN@STEP undeleted --remove removes that pin.
    """
    if checkpoint is None or "@" not in checkpoint:
        _list_deleted(session, checkpoint)
        return
    found = session.operator.undelete(Reference.parse(checkpoint), reason)
    back = f"{found.id} is back, and stays until ckptctl pin {short_id(found)} {UNDELETED} --remove"
    session.screen.emit(CheckpointBody.of(found), [found.id], [back])


def _list_deleted(session: Session, run: str | None) -> None:
    bodies = [body for name in session.run_names(run) for body in session.operator.deleted(name)]
    now = session.clock()
    rows = [(b.id, human.age(now - b.at), human.age(b.until - now), b.by, b.reason) for b in bodies]
    table = Table(("CHECKPOINT", ">DELETED", ">LEFT", "BY/1", "REASON"), rows)
    session.screen.emit(bodies, [body.id for body in bodies], [table], none="nothing is waiting to be deleted")


def collect_garbage(
    session: Session,
    run: RunArgument = None,
    grace: Annotated[
        str | None,
        an_option("On a store: keep unfinished saves that wrote within this time: 90s, 30m.  [default: 24h]", "TIME"),
    ] = None,
) -> None:
    """Delete data that is due, and finish what crashes left behind.

    Deletes checkpoints whose grace period is over, commits complete saves, and deletes incomplete ones older than
    --grace. A daemon runs this as a job, with its own grace setting.
    """
    reports = session.operator.collect(run, human.parse_duration(grace) if grace is not None else None)
    touched = [name for report in reports for name in (*report.swept, *report.rolled_forward, *report.aborted)]
    session.screen.emit(reports, touched, _collected_blocks(reports))


def _collected_blocks(reports: Sequence[CollectReport]) -> Iterator[Block]:
    rows = [
        (r.run, *(str(len(ids)) for ids in (r.swept, r.rolled_forward, r.aborted)), human.size(r.freed_bytes))
        for r in reports
    ]
    yield Table(("RUN", ">DELETED", ">ROLLED FORWARD", ">ABORTED", ">FREED"), rows)
    for report in reports:
        yield from (f"deleted {name}" for name in report.swept)
        yield from (f"rolled forward {name}" for name in report.rolled_forward)
        yield from (f"aborted {name}" for name in report.aborted)


def audit(
    session: Session,
    run: RunArgument = None,
    limit: Annotated[int, an_option("Show the newest N of each run.", "N", min=1, max=MAX_PAGE)] = 100,
) -> None:
    """Show the audit log, newest first: who deleted, undeleted, swept or pinned which checkpoints.

    A record is written before its action. Records are kept for a year.
    """
    found = [body for name in session.run_names(run) for body in session.operator.audit(name, limit)]
    found.sort(key=lambda body: body.at, reverse=True)
    rows = [(human.moment(b.at).removesuffix(" UTC"), b.by, b.action, b.reason, _ids(b.ids)) for b in found]
    table = Table(("WHEN, UTC", "WHO/2", "DID", "REASON/1", "CHECKPOINTS"), rows)
    session.screen.emit(found, [id for body in found for id in body.ids], [table], none="the audit log is empty")


def _ids(ids: list[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{human.count(len(ids), 'checkpoint')}: {', '.join(ids)}"
