"""A run of a store, with the clock and the identity of the caller."""

from __future__ import annotations

import getpass
import os
import socket
from dataclasses import dataclass, field

from ckptstore.clock import Clock, system_clock
from ckptstore.format.records import Origin
from ckptstore.names import Attempt, RunKeys, checkpoint_id
from ckptstore.stores import Store


def identity() -> str:
    """The identity of this process in documents: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


_JOBS = {
    "SLURM_JOB_ID": "slurm",
    "PBS_JOBID": "pbs",
    "LSB_JOBID": "lsf",
    "TORCHELASTIC_RUN_ID": "torchrun",
}
"""Variables in which schedulers name a job, the most specific ones first."""
_NO_JOB = ("", "none")


def origin() -> Origin:
    """The person or service account of this process, its host, and the job that it belongs to."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = "unknown"
    jobs = (f"{kind} {os.environ[name]}" for name, kind in _JOBS.items() if os.environ.get(name, "") not in _NO_JOB)
    return Origin(user=user, host=socket.gethostname(), job=next(jobs, ""))


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a store: the store, the name of the run, the clock, and the caller. Raises InvalidName."""

    store: Store
    name: str
    clock: Clock = system_clock
    by: str = field(default_factory=identity)
    """The identity of the caller in outcomes, tombstones and the audit log."""
    keys: RunKeys = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", RunKeys(self.name))

    def age_s(self, modified_at: float) -> float:
        """Seconds since an object was written, by the store's clock. Ages are never judged by a document's own times.

        `clock` stands for the store's clock: checks.check_store ensures before a deletion that they are at most
        MAX_SKEW_S apart.
        """
        return self.clock() - modified_at

    def id_of(self, attempt: Attempt) -> str:
        """The full id of one checkpoint: run@step.ulid."""
        return checkpoint_id(self.name, attempt)
