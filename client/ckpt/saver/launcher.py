"""ckpt-run: starts a trainer, and ends only when the savers that it leaves behind are done.

A container ends with its PID 1, and a Slurm step with its task: the kernel, or Slurm, then kills the saver, and with it
saves that were accepted. This program is PID 1 in the trainer's place. It forwards signals, reaps orphans, waits for
savers, and exits as the trainer did. It loads no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.saver.presence import SaverState

logger = logging.getLogger(__name__)

GRACE_S = 120.0
EXIT_SAVED = 75
"""Preempted, and the last step is saved: start the job again. EX_TEMPFAIL of sysexits.h."""
EXIT_BEHIND = 76
"""Preempted, and the newest checkpoint is older than the last step: start the job again."""
VARIABLE = "CKPT_LAUNCHER"
"""Set for the trainer: the process id of the launcher."""
_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = frozenset((
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
))  # fmt: skip
_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)
_SI_KERNEL = 0x80
"""The terminal has sent the signal, to the trainer as well."""
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
_FIRST_NAMESPACE = "pid:[4026531836]"
_END_WITH_THEIR_CHILD = ("tini", "docker-init", "dumb-init", "catatonit", "torchrun", "torch.distributed", "accelerate")


def parser() -> argparse.ArgumentParser:
    """The command line of ckpt-run."""
    found = argparse.ArgumentParser(
        prog="ckpt-run",
        description="Run a trainer, and end when the savers that it leaves behind are done. For PID 1 of a container, "
        "and for Slurm steps. The exit code is that of the trainer, or 128 and the number of its signal.",
    )
    found.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="SECONDS",
        help="how long to wait for savers after the trainer has ended (default: %(default).0f)",
    )  # fmt: skip
    found.add_argument(
        "--restarts", type=int, default=0, metavar="N",
        help="start a trainer that failed again, N times at most; not after a signal that ends it",
    )  # fmt: skip
    found.add_argument("command", nargs="+", help="the trainer, after --: ckpt-run -- torchrun train.py")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a trainer; returns its exit code, or 128 and the number of the signal that killed it."""
    options = parser().parse_args(arguments)
    logging.basicConfig(format="ckpt-run: %(message)s", level=logging.INFO, stream=sys.stderr)
    _become_reaper()
    watched = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    # Only now: numpy starts threads. They inherit the mask; without it they would take signals, and end this process.
    import ckpt.saver.presence  # noqa: F401

    status, forwarded = 0, set[int]()
    for left in range(options.restarts, -1, -1):
        trainer = _start(options.command, before)
        if trainer < 0:
            status = -trainer
            break
        status = _forward_until_it_ends(trainer, watched, forwarded)
        if not left or status in (0, EXIT_SAVED, EXIT_BEHIND) or forwarded & _ENDING:
            break
        logger.warning("the trainer has failed, exit code %d: it starts again, %d more times at most", status, left - 1)
    _wait_for_savers(options.grace)
    return status


def program() -> None:
    """Entry point of ckpt-run."""
    sys.exit(main())


@cache
def warn_without_launcher() -> None:
    """Warn once if this trainer's end ends its saver too: its container's PID 1 is the trainer, or what started it."""
    if VARIABLE not in os.environ and _ends_with_trainer():
        logger.warning(
            "when this trainer ends, the kernel kills its saver with it, and accepted saves are lost: the process with "
            "PID 1 is the trainer, or ends with it. Start it with: ckpt-run -- torchrun ... (docs/how-to/preemption.md)"
        )


def _ends_with_trainer() -> bool:
    from ckpt.saver.presence import is_descendant

    if os.getpid() == 1:
        return True
    try:
        if os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE or not is_descendant(os.getpid(), 1):
            return False
        words = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    # An init that ends with its child, or a launcher of ranks; what else runs as PID 1 may well outlive the trainer.
    return any(name in os.path.basename(word) for word in words[:3] for name in _END_WITH_THEIR_CHILD)


def _become_reaper() -> None:
    """Orphans of the trainer become children of this process. PID 1 has them anyway."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may ignore it: then children leave no exit code
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _start(command: Sequence[str], mask: Collection[int]) -> int:
    """Process id of the trainer; the negative exit code if it cannot be started."""
    environment = {**os.environ, VARIABLE: str(os.getpid())}
    try:
        return os.posix_spawnp(command[0], [*command], environment, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)
    except FileNotFoundError:
        logger.error("%s: command not found", command[0])
        return -_NOT_FOUND
    except OSError as error:
        logger.error("%s: %s", command[0], error)
        return -_NOT_EXECUTABLE


def _forward_until_it_ends(trainer: int, watched: Collection[int], forwarded: set[int]) -> int:
    """Forward signals to the trainer and reap orphans until it ends; returns its exit code."""
    while (status := _reap(trainer)) is None:
        arrived = signal.sigwaitinfo(watched)
        forwarded.add(arrived.si_signo)
        if arrived.si_signo in _FORWARDED and arrived.si_code != _SI_KERNEL:
            with suppress(ProcessLookupError):
                os.kill(trainer, arrived.si_signo)
    return status


def _reap(trainer: int) -> int | None:
    """Reap children that have ended; the exit code of the trainer, if it is one of them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == trainer:
                code = os.waitstatus_to_exitcode(ended[1])
                return code if code >= 0 else 128 - code
    return None


def _wait_for_savers(grace_s: float) -> None:
    """Return when the savers are done, `grace_s` are over, or SIGINT arrives."""
    from ckpt.saver.presence import describe, drain
    from ckptstore.errors import CkptError

    started = time.monotonic()
    seen: Collection[SaverState] = ()

    def announce(states: Collection[SaverState]) -> None:
        nonlocal seen
        if states and not seen:
            logger.info("the trainer has ended; waits at most %.0f s for savers: %s", grace_s, describe(states))
        seen = states or seen

    try:
        left = drain(_own_savers, grace_s, announce, _pause, trainers_too=True)
    except CkptError as error:
        logger.error("cannot look for savers: %s", error)
        return
    if left:
        logger.error("savers are not done after %.1f s: %s", time.monotonic() - started, describe(left))
    elif seen:
        waiting = [state for state in seen if state.waiting]
        done = "all shards are durable; a commit waits for other ranks" if waiting else "all saves are durable"
        logger.info("%s, %.1f s after the trainer has ended", done, time.monotonic() - started)


def _own_savers() -> list[SaverState]:
    """The savers that the trainer has left to this process, or to a descendant that still runs."""
    from ckpt.saver.presence import is_descendant, parent_of, savers

    _reap(0)
    return [state for state in savers() if is_descendant(state.pid, os.getpid()) and parent_of(state.pid)]


def _pause(seconds: float) -> bool:
    """Sleep; True if the user interrupts the wait."""
    arrived = signal.sigtimedwait([signal.SIGINT], seconds)
    return arrived is not None
