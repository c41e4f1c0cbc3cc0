"""Work units: what a command does to many checkpoints, cut for several processes or hosts. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from zlib import crc32

from ckptstore.errors import InvalidRequest

MOST_TARGETS = 16
MOST_BYTES = 16 << 30
"""A unit ends before a checkpoint that exceeds this. A single checkpoint is never cut."""


class Unit(NamedTuple):
    """Targets that one worker takes at a time."""

    targets: tuple[str, ...]
    """Ids of checkpoints of one run, so that the chunks that they share are read once; or the name of one run."""
    bytes: int
    """0 if that is not known."""


def units_of(singles: Iterable[Unit]) -> Iterator[Unit]:
    """Units of a single target, joined: as many of one run as fit, in the given order."""
    joined: dict[str, Unit] = {}
    for single in singles:
        run = single.targets[0].partition("@")[0]
        unit = joined.get(run, Unit((), 0))
        if unit.targets and (len(unit.targets) == MOST_TARGETS or unit.bytes + single.bytes > MOST_BYTES):
            yield unit
            unit = Unit((), 0)
        joined[run] = Unit(unit.targets + single.targets, unit.bytes + single.bytes)
    yield from joined.values()


class Part(NamedTuple):
    """One of several equal parts of the targets of a command, counted from 1."""

    number: int
    of: int

    @staticmethod
    def parse(text: str, environment: Mapping[str, str]) -> Part:
        """The part that `3/8` names; `auto`: the one of this task of a Slurm array or of a Kubernetes Indexed Job.

        Raises InvalidRequest, also in the last task of an array whose ids have gaps.
        """
        try:
            if text != "auto":
                number, of = map(int, text.split("/"))
            elif "JOB_COMPLETION_INDEX" in environment:
                number, of = int(environment["JOB_COMPLETION_INDEX"]) + 1, int(environment["JOB_COMPLETIONS"])
            else:
                task, first, of = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT"))
                number = task - first + 1
        except (KeyError, ValueError):
            number = of = 0
        if not 1 <= number <= of:
            raise InvalidRequest(
                f"--part {text} names no part here",
                "Use 1/8 to 8/8; auto in a Slurm array (--array=1-8) or an Indexed Job that sets JOB_COMPLETIONS",
            )
        return Part(number, of)

    def has(self, target: str) -> bool:
        """Whether a target belongs to this part.

        Depends on its name alone: parts that list a store at different times leave nothing out.
        """
        return crc32(target.encode()) % self.of == self.number - 1
