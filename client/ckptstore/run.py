"""One run of a store, and the process that acts on it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from ckptstore.clock import Clock, system_clock
from ckptstore.names import Attempt, RunKeys, checkpoint_id
from ckptstore.stores import Store


def identity() -> str:
    """This process as documents name it: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a store: the store, the run's name, the clock, and who acts. Raises InvalidName."""

    store: Store
    name: str
    clock: Clock = system_clock
    by: str = field(default_factory=identity)
    """The caller, as outcomes, tombstones and the audit log name it."""
    keys: RunKeys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", RunKeys(self.name))

    def id_of(self, attempt: Attempt) -> str:
        """The full id of one checkpoint: run@step.ulid."""
        return checkpoint_id(self.name, attempt)
