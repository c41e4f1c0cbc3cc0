"""prune: deletes the checkpoints that no rule keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from ckptapi.bodies import PruneBody
from ckptctl.commands.arguments import RunArgument, YesOption, a_flag, an_option
from ckptctl.commands.fleet import in_units
from ckptctl.commands.listing import STATE_STYLES, short_id
from ckptctl.commands.struct_options import with_options
from ckptctl.render import Block, Row, Table
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.errors import CheckpointHeld, PartlyDone
from ckptstore.format.records import Policy
from ckptstore.retention.policy import KeepDecision
from ckptstore.retention.pruning import Prune, PrunePlan


@in_units("run", lambda session, run, **_: session.run_names(run), dry_run=False)
@with_options(rules=Policy)
def prune(
    session: Session,
    run: RunArgument = None,
    rules: Any = None,
    grace: Annotated[
        str | None, an_option("Time until the data is deleted; undelete works until then.  [default: 24h]", "TIME")
    ] = None,
    dry_run: Annotated[bool, a_flag("Only show which checkpoints stay and which go.", "--dry-run")] = False,
    yes: YesOption = False,
    force: Annotated[bool, a_flag("With --yes: even if it deletes nearly all of a run.", "--force")] = False,
) -> None:
    """Delete old checkpoints.

    Each run is pruned separately. A checkpoint stays if any rule keeps it, if it is the newest or the last verified,
    or if it is pinned or being read. Without rules, the policies in force apply (ckptctl policy). Removed checkpoints
    disappear from listings immediately and are deleted after the grace period. ckptctl undelete restores them until
    then.
    """
    policy = Policy(**rules) if rules else None
    grace_s = human.parse_duration(grace) if grace is not None else None
    # A person who answers yes has seen the plan on the screen.
    wanted = Prune(policy, run, grace_s, force=force or not yes)
    plan = session.operator.plan_prune(wanted)
    if dry_run or not plan.affected:
        body = PruneBody.of(plan, dry_run)
        session.screen.emit(body, [c.id for c in plan.remove], _plan_blocks(plan, session.clock()))
        return
    if not yes:
        session.screen.preview([*_plan_blocks(plan, session.clock()), ""])
        freed = f"after {human.duration(plan.grace_s)}" if plan.grace_s else "at once"
        session.screen.confirm(f"Delete {_amount(plan.remove)}{_and_thin(plan)}, freed {freed}?")
    with session.screen.progress("deleting", plan.freed_bytes) as progress:
        done = session.operator.prune(wanted, plan, progress)
    body = PruneBody.of(done, dry_run=False)
    session.screen.emit(body, [c.id for c in done.remove], _done_blocks(done, shown=not yes))
    if done.held:
        message = f"{human.count(len(done.held), 'checkpoint')} spared, held: {', '.join(c.id for c in done.held)}"
        raise (PartlyDone if done.remove else CheckpointHeld)(message, "Prune again later")


def _plan_blocks(plan: PrunePlan, now: float) -> Iterator[Block]:
    if plan.keep:
        yield f"Keep {_amount([decision.checkpoint for decision in plan.keep])}{_and_thin(plan)}"
        yield _table(plan.keep, now)
        yield ""
    if plan.remove:
        yield f"Remove {_amount(plan.remove)}"
        yield _table([decision for decision in plan.decisions if not decision.reasons], now)
    else:
        yield "Nothing to remove"


def _done_blocks(done: PrunePlan, shown: bool) -> Iterator[Block]:
    if not shown:
        for checkpoint in done.remove:
            yield f"removed {checkpoint.id}"
    count, size = human.count(len(done.remove), "checkpoint") + _and_thin(done), human.size(done.freed_bytes)
    if done.grace_s:
        until = human.duration(done.grace_s)
        yield f"Hid {count}; {size} are freed in {until}; ckptctl undelete restores them until then"
    else:
        yield f"Removed {count}, freed {size}"


def _table(decisions: Sequence[KeepDecision], now: float) -> Table:
    columns = ("  CHECKPOINT", "STATE/1", ">AGE", ">STORED", "REASONS")
    rows = []
    for decision in decisions:
        c = decision.checkpoint
        state = State.THINNED if decision.thins else c.state
        cells = (f"  {short_id(c)}", state, human.age(now - c.committed_at), human.size(c.stored_bytes))
        rows.append(Row((*cells, ", ".join(decision.reasons) or decision.why_removed), STATE_STYLES[c.state]))
    return Table(columns, rows)


def _and_thin(plan: PrunePlan) -> str:
    size = human.size(sum(checkpoint.optimizer_bytes for checkpoint in plan.thin))
    return f" and the optimizer state of {len(plan.thin)}, {size}" if plan.thin else ""


def _amount(checkpoints: Sequence[Checkpoint]) -> str:
    stored = sum(checkpoint.stored_bytes for checkpoint in checkpoints)
    runs = len({checkpoint.run for checkpoint in checkpoints})
    of_runs = f" of {runs} runs" if runs > 1 else ""
    return f"{human.count(len(checkpoints), 'checkpoint')}{of_runs}, {human.size(stored)}"
