"""One rank of the benchmark replicas: restores in all ways in turns, and compares every bit."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from bench.measuring import REPETITIONS, rotated
from bench.replicas import MODES, RUN
from bench.state import State, trained
from ckpt import Checkpointer
from tests.support import seaweed
from tests.support.daemons import running_daemon
from tests.support.seaweed import S3Service

_SHARE: dict[str, Any] = {"broadcast": "broadcast", "daemon": "daemon", "alone": "none"}


class Rank:
    """A replica."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.rank = int(os.environ["RANK"])
        self.service = S3Service(*task["service"])
        self.url: str = task["url"]
        self.digest: str = task["digest"]
        self.state: State = trained("fp32", task["num_bytes"])

    def measure(self, mode: str) -> dict[str, float]:
        """Seconds until all ranks are done, and bytes sent by the store."""
        self.state.forget()
        with self.daemon(mode) as daemon:
            options: Any = {"options": self.service.options, "replica_reads": _SHARE[mode], "daemon": daemon}
            with Checkpointer(self.url, run=RUN, **options) as checkpointer:
                dist.barrier()
                sent, began = seaweed.sent_bytes(self.service), time.perf_counter()
                dist.barrier()
                checkpointer.restore(self.state.model, self.state.optim)
                dist.barrier()
                seconds = time.perf_counter() - began
                found = {"seconds": seconds, "sent_bytes": seaweed.sent_bytes(self.service) - sent}
        if self.state.digest() != self.digest:
            raise RuntimeError(f"rank {self.rank} restored a state that differs from the saved one ({mode})")
        return found

    @contextmanager
    def daemon(self, mode: str) -> Iterator[str | None]:
        """Run by rank 0, with an empty cache."""
        if mode != "daemon":
            yield None
            return
        url: list[str | None] = [None]
        if self.rank:
            dist.broadcast_object_list(url)
            yield url[0]
            dist.barrier()
            return
        environment = os.environ | self.service.environment
        with running_daemon(self.url, options=("--poll-seconds", "600"), environment=environment) as daemon:
            dist.broadcast_object_list([daemon.url])
            yield daemon.url
            dist.barrier()


def main() -> None:
    """Rank 0 prints the result."""
    dist.init_process_group("gloo")
    # One rank saved it, and four restore it: each restore would otherwise log the handling of random state.
    logging.getLogger("ckpt").setLevel(logging.ERROR)
    rank = Rank(json.loads(sys.argv[1]))
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for repetition in range(REPETITIONS):
        for mode in rotated(MODES, repetition):
            found[mode].append(rank.measure(mode))
    if rank.rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
