"""Training jobs of several processes that print what they do, to be killed at a step and started again.

All ranks print to one pipe that holds a single line. A job whose lines nobody reads stops in the middle of training: it
cannot end before it is killed, on a machine of any speed, and it is killed where it was meant to be.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

from tests.support.forking import TRAINER, fork
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S

if TYPE_CHECKING:
    from tests.hosts.bed import Machine

_PIPE_BYTES = 4096
"""A page: of a pipe of packets it holds one, whatever its size."""


class Job:
    """The ranks of a job: forks that run a module with arguments, in the environment that torchrun would give them."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
        machines: Sequence[Machine] = (),
    ) -> None:
        """machines: the hosts of the job, which divide the ranks equally; by default this one."""
        reader, writer = os.pipe2(os.O_DIRECT | os.O_CLOEXEC)
        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._reader, self._rest = reader, b""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed when the job has ended
        forks = [machine.fork for machine in machines] or [partial(fork, TRAINER)]
        each = world_size // len(forks)
        meeting = {
            "PYTHONUNBUFFERED": "", "MASTER_ADDR": machines[0].address if machines else "127.0.0.1",
            "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(each),
        }  # fmt: skip
        self.ranks = [
            forks[rank // each](
                module,
                arguments,
                stdout=writer,
                stderr=self._errors.fileno(),
                environment={**os.environ, **(environment or {}), **meeting, "RANK": str(rank)},
                strict=True,
            )
            for rank in range(world_size)
        ]
        os.close(writer)

    def lines(self) -> Iterator[list[str]]:
        """The words of each line, as they come; the end when all ranks have ended. AssertionError if nothing comes."""
        while True:
            *lines, self._rest = self._rest.split(b"\n")
            yield from (line.decode().split() for line in lines)
            if not select.select([self._reader], [], [], DEADLINE_S)[0]:
                raise AssertionError(f"nothing was printed for {DEADLINE_S} s\n{self.errors()}")
            data = os.read(self._reader, _PIPE_BYTES)
            if not data:
                return
            self._rest += data

    def until(self, step: int, ranks: int = 1) -> list[list[str]]:
        """The lines of the form "step RANK STEP ..." and others, until so many ranks have come to this step."""
        found, came = [], set()
        for words in self.lines():
            found.append(words)
            if words[0] == "step" and int(words[2]) >= step:
                came.add(words[1])
            if len(came) == ranks:
                return found
        raise AssertionError(f"the job ended before step {step}\n{self.errors()}")

    def finish(self) -> list[list[str]]:
        """All lines; AssertionError if a rank fails."""
        found, codes = list(self.lines()), [rank.wait(DEADLINE_S) for rank in self.ranks]
        assert not any(codes), f"exit {codes}\n{self.errors()}"
        return found

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(len(self.ranks)):
            self.ranks[rank].send_signal(signal.SIGKILL)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        for rank in self.ranks:
            rank.wait(DEADLINE_S)
        os.close(self._reader)
        self._errors.close()


def killed_and_resumed(
    module: str,
    arguments: Sequence[str],
    world_size: int,
    at: int,
    environment: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> tuple[int, list[list[str]]]:
    """Kill a job when `ranks` have come to a step, start it again: where it resumed, and all lines that count.

    The job prints "resumed STEP" when it resumes, and "step RANK STEP ..." after each step.
    """
    with Job(module, arguments, world_size, environment) as job:
        first = job.until(at, ranks)
    with Job(module, arguments, world_size, environment) as job:
        second = job.finish()
    resumed = next(int(words[1]) for words in second if words[0] == "resumed")
    return resumed, [*kept(first, resumed), *(words for words in second if words[0] != "resumed")]


def kept(lines: Sequence[list[str]], resumed: int) -> list[list[str]]:
    """The lines of steps that were not repeated after a resume from this step."""
    return [words for words in lines if words[0] == "step" and int(words[2]) <= resumed]
