"""A run of a store, with the clock and the identity of the caller."""

from __future__ import annotations

import gc
import getpass
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.errors import Damaged, InvalidName, ObjectMissing
from ckptstore.format.documents import StoredDocument
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.format.records import Origin
from ckptstore.names import Attempt, RunKeys, checkpoint_id
from ckptstore.stores import ObjectInfo, Store

_D = TypeVar("_D", bound=StoredDocument)


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


def trackers() -> dict[str, str]:
    """The runs of experiment trackers that this process logs to, as in `Origin`. Loads none of them."""
    found: dict[str, str | None] = {}
    wandb, mlflow, board = map(sys.modules.get, ("wandb", "mlflow", "torch.utils.tensorboard.writer"))
    if wandb is not None and (run := wandb.run) is not None:
        found["W&B"] = run.url or run.dir  # a folder when it is offline
    if mlflow is not None and (run := mlflow.active_run()) is not None:
        place = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
        found["MLflow"] = f"{mlflow.get_tracking_uri()}/{place}"
    if board is not None:
        writers = (one.log_dir for one in gc.get_objects() if issubclass(type(one), board.SummaryWriter))
        found["TensorBoard"] = next(writers, None)
    return {name: place for name, place in found.items() if place}


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

    def read(self, key: str, kind: type[_D]) -> _D:
        """The document at a key, checked. Raises ObjectMissing, Damaged or Unavailable."""
        return parse_sealed(self.store.get(key), kind, self.store.object_url(key))

    def read_intact(self, key: str, kind: type[_D]) -> _D | None:
        """The document at a key; None if it is missing or damaged. Raises Unavailable."""
        try:
            return self.read(key, kind)
        except (Damaged, ObjectMissing):
            return None

    def write(self, key: str, document: StoredDocument) -> None:
        """Write a document; durable on return."""
        self.store.put(key, seal(document))

    def listed(self, prefix: str) -> Iterator[tuple[Attempt, str, ObjectInfo]]:
        """The objects below a prefix that are named ATTEMPT.json or ATTEMPT.NAME.json: attempt, name and object.

        All others are foreign: an operator's note, a partial copy.
        """
        for info in self.store.list(prefix):
            try:
                attempt, name = names.attempt_and_name(info.key)
            except InvalidName:
                continue
            yield attempt, name, info

    def objects(self, attempt: Attempt, optimizer: bool = False) -> list[ObjectInfo]:
        """All objects that an attempt wrote before its outcome; optimizer: the shards that a thinned one lacks."""
        found = self.store.list(self.keys.attempt(attempt))
        return [info for info in found if not optimizer or names.is_optimizer_shard(info.key)]

    def listed_by_ulid(self, prefix: str) -> Iterator[tuple[str, ObjectInfo]]:
        """The objects below a prefix that are named ULID.json: the ULID and the object. All others are foreign."""
        for info in self.store.list(prefix):
            ulid = info.key.rsplit("/", 1)[-1].removesuffix(".json")
            if names.is_ulid(ulid):
                yield ulid, info

    def id_of(self, attempt: Attempt) -> str:
        """The full id of one checkpoint: run@step.ulid."""
        return checkpoint_id(self.name, attempt)
