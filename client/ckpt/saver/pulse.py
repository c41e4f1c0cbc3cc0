"""Pulse: the step that training has reached, in memory that the trainer shares with its saver.

The trainer writes a few numbers per step; no system call, no lock, no message. The saver reads them when a heartbeat is
due, also after the trainer was killed. Each number is written at once; a reader may see numbers of two adjacent steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from ckpt.saver.segment import Segment

NUM_BYTES = 4096


class Ending(IntEnum):
    """What the trainer knows about its end before it comes."""

    NONE = 0
    REQUESTED = 1
    """A save was requested: it is about to be preempted."""
    ERROR = 2
    """It closes because of an exception."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The numbers of a pulse."""

    at: float
    """When the step was reached; 0: none was in this life."""
    step: int
    stalled_s: float
    slowed_s: float
    ending: Ending


class Pulse:
    """The numbers, in shared memory. One process writes, the other reads."""

    def __init__(self, segment: Segment | None = None) -> None:
        """segment: that of a received descriptor; None: create it."""
        self.segment = segment or Segment(NUM_BYTES)
        self._numbers = self.segment.view.cast("d")

    def write(self, at: float, step: int, stalled_s: float, slowed_s: float) -> None:
        """A step is reached."""
        numbers = self._numbers
        numbers[1], numbers[2], numbers[3] = float(step), stalled_s, slowed_s
        numbers[0] = at

    def write_ending(self, ending: Ending) -> None:
        """Note how the life will end, if it does."""
        self._numbers[4] = float(ending)

    def read(self) -> Reading:
        """The present numbers."""
        at, step, stalled_s, slowed_s, ending = self._numbers[:5].tolist()
        return Reading(at, int(step), stalled_s, slowed_s, Ending(int(ending)))

    def close(self) -> None:
        """Close the descriptor; the memory stays until its last view is gone."""
        self.segment.close()
