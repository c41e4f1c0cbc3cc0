"""The saver process: receives snapshots in shared memory and makes them durable.

It runs in its own session and holds descriptors of the arena. When the trainer dies, the socket reaches end of file;
the saver finishes every job it has received, then exits. Until its uploads are done it holds an inherited lock
(ckpt.host.lock), so that the next trainer on this host waits for them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ckpt.host.segment import Segment
from ckpt.saver.encode import lower_priority
from ckpt.saver.messages import (
    IGNORED,
    Channel,
    Command,
    Idle,
    Report,
    SaveJob,
    Setup,
    Slot,
    Stop,
    TrainerStarted,
    Unreplicable,
    Warned,
)
from ckpt.saver.pipeline import SavePipeline, open_saved
from ckpt.saver.presence import SaverNote
from ckpt.saver.retained_snapshot import retain_snapshot
from ckptstore.errors import CkptError

logger = logging.getLogger(__name__)


def main(sock: int, lock: int, note_fd: int, note_path: str) -> int:
    """Serve the trainer at the other end of a socket until it stops or dies. Returns the exit status.

    lock: the inherited descriptor of the saver's lock (ckpt.host.lock). note_fd, note_path: its note (presence.py).
    """
    logging.basicConfig(format="%(asctime)s ckpt saver %(process)d: %(message)s", stream=sys.stderr)
    lower_priority()
    channel = Channel(socket.socket(fileno=sock))
    setup = channel.receive(Command)
    if not isinstance(setup, Setup):
        return 1
    note = SaverNote(setup, note_fd, Path(note_path))
    sending = threading.Lock()

    def report(report: Report | Idle) -> None:
        """Send it while the trainer is alive. For any thread."""
        if not isinstance(report, Warned | Unreplicable | Idle):
            note.reported(report)
        with suppress(OSError), sending:  # the trainer may be gone; the result is in the store
            channel.send(report)

    pipeline = SavePipeline(open_saved(setup), setup, report, own_process=True)
    stop, failed = None, False
    try:
        stop = _serve(channel, pipeline, note)
    except Exception:  # a message that is no command, say: what was accepted is finished, as if the trainer had died
        logger.exception("this saver accepts no more saves")
        failed = True
    pipeline.heartbeats.stop(closed=stop is not None)
    note.orphaned()
    pipeline.finish_uploads()
    # From here on the saver may only wait for other ranks, and any process that sees all receipts can commit. Free the
    # lock for the next trainer, which need not wait for that, and all memory that it cannot use.
    kept = retain_snapshot(
        setup, pipeline.contents if stop is None or stop.retain_snapshot else None, pipeline.segments
    )
    os.close(lock)
    pipeline.close()
    if kept is not None:
        report(Idle())
        channel.close()
        _yield_to_all()
        note.orphaned(idle=True)
        kept.wait()
    else:
        channel.close()
    note.close()
    return int(failed)


def _yield_to_all() -> None:
    """All work is done: this process only keeps memory, and ends at the first request, or if the host needs memory."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_DFL)
    os.chdir("/")  # the file system of the job may be unmounted
    with suppress(OSError):  # the system has no such choice
        Path("/proc/self/oom_score_adj").write_text("1000")


def _serve(channel: Channel, pipeline: SavePipeline, note: SaverNote) -> Stop | None:
    """Carry out commands until the trainer stops this saver, or dies: then the result is None."""
    while (command := channel.receive(Command)) is not None:
        if isinstance(command, Stop):
            return command
        if isinstance(command, SaveJob):
            note.accepted(command)
        with_memory = isinstance(command, Slot | TrainerStarted)
        pipeline.carry_out(command, Segment(command.num_bytes, channel.take_fd()) if with_memory else None)
    return None


def run(sock: int, lock: int, note_fd: int, note_path: str) -> None:
    """Entry point of the process."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)  # blocked since it was started, so that none ended its imports
    try:
        status = main(sock, lock, note_fd, note_path)
    except CkptError as error:
        print(error, file=sys.stderr)
        status = 1
    sys.exit(status)
