"""Documents between `ckptctl rehearse` and the trainers that it starts: files in the folder of a run. No torch."""

from __future__ import annotations

import msgspec


class Plan(msgspec.Struct):
    """How a life of the program ends: with a number of saves, with a save of this step, or by a kill."""

    life: int = 0
    num_saves: int = 0
    last: int = 0
    """0: any."""
    rank: int = 0
    key: str = ""
    """The event at which this rank is killed."""
    savers: bool = True
    """Whether savers are killed with it."""


class Event(msgspec.Struct):
    """A moment of a rank."""

    step: int
    """The one that was saved or restored last; -1: none."""
    count: int
    """The calls and steps of training since then."""
    kind: str
    """saved, restored, loader, validation, forward, window (forward again before a step), or step."""
    rank: int
    at: float
    """In seconds, by the clock of the host."""
    state: dict[str, str]
    """Digests by path: weights/..., optimizer/..., extras/..., random/..., batch/..., gradients/..., variables/..."""

    @property
    def key(self) -> str:
        """The same in each life of the program."""
        return f"{self.step}:{self.count} {self.kind}"
