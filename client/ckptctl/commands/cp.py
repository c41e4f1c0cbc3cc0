"""cp: copies checkpoints to another store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Annotated

from ckptapi.bodies import CheckpointBody
from ckptapi.remote_create import with_remote_create
from ckptctl.commands.arguments import ChosenArgument, DryRunOption, an_option
from ckptctl.commands.fleet import in_units
from ckptctl.commands.listing import show_meant
from ckptctl.session import Session
from ckptstore import human
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CkptError, Damaged, InvalidRequest, NotFound, PartlyDone, StoreFull
from ckptstore.names import check_run
from ckptstore.reading.fetch import Progress
from ckptstore.retention.pruning import check_limit
from ckptstore.run import Run
from ckptstore.stores import Store, open_store, resolve_url
from ckptstore.tiers.copying import Copied, copy_checkpoint


@in_units("which", lambda session, which, **_: _usable(session, which or []), dry_run=False)
def copy_checkpoints(
    session: Session,
    which: ChosenArgument = None,
    to: Annotated[str, an_option("The other store: a path, file://, s3://, ...", "STORE")] = "",
    name: Annotated[str | None, an_option("Name of the run there.", "RUN", "--as")] = None,
    dry_run: DryRunOption = False,
) -> None:
    """Copy checkpoints to another store; RUN copies all committed ones of a run, oldest first.

    Every chunk is verified, and a copy exists only when all of it is durable, as after a save. A command that was
    interrupted continues if it is repeated: copies and shards that are complete there are not written again. Tags and
    metrics are copied, pins are not. Chunks in earlier checkpoints are stored with each copy that needs them. If some
    checkpoints cannot be copied, because they are damaged for example, the others are, and the exit code is 3.
    """
    if not which or not to:
        missing = "nothing to copy is given" if not which else "no store to copy to is given"
        raise InvalidRequest(missing, "Use ckptctl cp RUN@STEP --to STORE")
    if name is not None:
        check_run(name)
    if not session.target.is_daemon and resolve_url(to) == resolve_url(session.target.url) and name is None:
        raise InvalidRequest("the store to copy to is the same", "Use another --to, or another run with --as")
    # If the store's create-only writes overwrite, the daemon decides who commits.
    target = with_remote_create(open_store(to), os.environ.get("CKPTD_URL"), os.environ.get("CKPT_TOKEN"))
    chosen = _usable(session, which)
    if name is not None and len({c.run for c in chosen}) > 1:
        raise InvalidRequest("--as names one run, but several are copied", "Copy them one after the other")
    if dry_run:
        show_meant(session, "copy", chosen)
        return
    with session.screen.progress("copying", sum(c.needed_bytes for c in chosen)) as progress:
        done, failed = _copy_each(session, chosen, target, name, progress)
    bodies = [
        {"original": original.id, "copy": CheckpointBody.of(copy.checkpoint), "existed": copy.existed}
        for original, copy in done
    ]
    session.screen.emit(bodies, [copy.checkpoint.id for _, copy in done], _lines(done, to))
    if failed and not done:
        raise failed[0]
    if failed:
        raise PartlyDone("; ".join(error.message for error in failed), failed[0].hint)


def _usable(session: Session, which: Sequence[str]) -> list[Checkpoint]:
    chosen = ((text, c) for text in which for c in reversed(session.chosen(text)))
    return list({c.id: c for text, c in chosen if "@" in text or c.live}.values())


def _copy_each(
    session: Session, chosen: Sequence[Checkpoint], target: Store, name: str | None, progress: Progress
) -> tuple[list[tuple[Checkpoint, Copied]], list[CkptError]]:
    done: list[tuple[Checkpoint, Copied]] = []
    failed: list[CkptError] = []
    for original in chosen:
        run = Run(target, name or original.run, session.clock)
        try:
            check_limit(run, original.needed_bytes)
            with session.leased(original):
                done.append((original, copy_checkpoint(session.source, original, run, progress)))
        except (InvalidRequest, Damaged, NotFound, StoreFull) as error:
            failed.append(error)
    return done, failed


def _lines(done: Sequence[tuple[Checkpoint, Copied]], to: str) -> Iterator[str]:
    for original, copy in done:
        size = human.size(copy.checkpoint.stored_bytes)
        did = "was there already" if copy.existed else f"copied, {size}"
        yield f"{original.id}: {did}: {copy.checkpoint.id} in {to}"
