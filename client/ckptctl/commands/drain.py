"""drain: waits until the savers of this host have made durable what they accepted."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated

from ckpt.saver.presence import SaverState, describe, savers
from ckpt.saver.presence import drain as wait_for_savers
from ckptctl.commands.arguments import an_argument, an_option
from ckptctl.session import Session
from ckptstore import human
from ckptstore.errors import InvalidRequest, PartlyDone
from ckptstore.names import check_run

_NOTE_EVERY_S = 2.0


def drain(
    session: Session,
    run: Annotated[str | None, an_argument("Only savers of this run.", "RUN")] = None,
    timeout: Annotated[float, an_option("Wait at most this long.", "SECONDS")] = 25.0,
) -> None:
    """Wait until the savers of this host are done: what trainers have saved is durable. For preStop hooks and epilogs.

    Looks at this host only, at savers of this user, and needs no store. Exit code 0: all are done, or there is none;
    3: some are not, or a save failed meanwhile. Savers go on after this command has ended.
    """
    if timeout < 0:
        raise InvalidRequest(f"timeout {timeout} is negative", "Give seconds")
    if run is not None:
        check_run(run)

    def find() -> list[SaverState]:
        return [state for state in savers() if run is None or state.run == run]

    began, noted_at = time.monotonic(), -_NOTE_EVERY_S
    first = find()
    failed = {state.pid: state.failed for state in first}
    newer: dict[int, int] = {}

    def progress(states: Collection[SaverState]) -> None:
        nonlocal noted_at
        newer.update({state.pid: state.failed - failed.get(state.pid, 0) for state in states})
        busy = [state for state in states if state.uploading or state.waiting]
        if busy and time.monotonic() >= noted_at + _NOTE_EVERY_S:
            noted_at = time.monotonic()
            session.screen.note(describe(busy))

    left = wait_for_savers(find, timeout, progress)
    lost = sum(newer.values())
    durable = not left and not lost
    body = {"durable": durable, "seconds": round(time.monotonic() - began, 3), "savers": len(first), "left": left}
    found = human.count(len(first), "saver")
    text = f"{found} found, all saves are durable" if first else "no saver runs on this host"
    session.screen.emit(body, [str(state.pid) for state in left], [text] if durable else [])
    if not durable:
        raise PartlyDone(
            f"{human.count(len(left), 'saver')} of {len(first)} not done after {timeout:g} s, "
            f"{human.count(lost, 'save')} failed: {describe(left) or 'see the log of the trainer'}",
            "Savers go on while their host lets them. Allow more time: ckptctl plan shows how long a save takes",
        )
