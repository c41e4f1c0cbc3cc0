"""A process that acts on a store with the client in its PYTHONPATH: one JSON request a line, one reply a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ckptstore.commits.catalog import Checkpoint, list_checkpoints, newest_first
from ckptstore.errors import CkptError
from ckptstore.format.documents import FORMAT
from ckptstore.format.records import Policy
from ckptstore.names import Attempt
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import write_checkpoint

RUN = "gpt"
Facts = dict[str, Any]


def arrays(value: int) -> dict[str, Any]:
    """What is saved: a chunk that never changes, and one that always does."""
    return {"model/a": np.arange(40, dtype=np.float32), "model/step": np.array([value, 1], np.int64)}


def saved(checkpoint: Checkpoint) -> Facts:
    return {"attempt": str(checkpoint.attempt), "digest": checkpoint.manifest_digest}


def whole(store: Store, checkpoint: Checkpoint) -> bool:
    """Whether every byte is as it was saved: the digest of the manifest covers all others."""
    return verify(StoreSource(store), checkpoint, threads=1).ok


class Client:
    """What a trainer, a reader and an operator do."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def save(self, step: int, value: int, base: str | None = None) -> Facts:
        attempt = Attempt.parse(base) if base else None
        return saved(write_checkpoint(self._store, RUN, step, arrays(value), base=attempt))

    def list(self) -> list[Facts]:
        found = list_checkpoints(Run(self._store, RUN))
        return [{**saved(c), "state": c.state.value, "whole": whole(self._store, c)} for c in found]

    def latest(self) -> Facts | None:
        found = next(newest_first(Run(self._store, RUN)), None)
        return {**saved(found), "whole": whole(self._store, found)} if found is not None else None

    def prune(self, keep: int, grace_s: float) -> Facts:
        run = Run(self._store, RUN)
        plan = plan_prune(run, Policy(keep_last=keep))
        spared = apply_prune(run, plan, grace_s=grace_s)
        gone = {c.attempt for c in plan.remove} - {c.attempt for c in spared}
        return {"removed": sorted(map(str, gone))}

    def collect(self) -> Facts:
        return {"swept": sorted(map(str, collect(Run(self._store, RUN)).swept))}


def main(url: str) -> None:
    client = Client(open_store(url))
    print(json.dumps({"format": FORMAT}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        act: Callable[..., Any] = getattr(client, request.pop("act"))
        try:
            reply = {"result": act(**request)}
        except CkptError as error:
            reply = {"error": error.code}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
