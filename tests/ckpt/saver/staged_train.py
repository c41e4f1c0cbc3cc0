"""A trainer without torch: `staged_train STORE MEGABYTES SAVES`. It hands snapshots to a saver, and waits.

It prints "saver PID", and "accepted STEP" as soon as a save would survive its death.
"""

from __future__ import annotations

import logging
import os
import sys
import time

import numpy as np

from ckpt.host.segment import Segment
from ckpt.saver.messages import SaveJob, Setup, SliceRow, Slot
from ckpt.snapshot.writers import ProcessWriter
from ckptstore.clock import system_clock
from ckptstore.commits.generations import NewAttempt, Session
from ckptstore.names import new_ulid


def main() -> None:
    logging.basicConfig(stream=sys.stderr)
    store, megabytes, saves = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    count = megabytes << 18
    setup = Setup(
        store=store, options={}, run="r", rank=0, world_size=1, compress="off", peer_timeout_s=60.0, daemon=None,
        token=None, max_references=0, statistics=False, trainer=os.getpid(),
    )  # fmt: skip
    writer = ProcessWriter(setup, lambda report: None, lambda error: None)
    print("saver", writer.pid, flush=True)
    session = Session(new_ulid(system_clock()), None)
    for step in range(1, saves + 1):
        segment = Segment(count * 4)
        np.frombuffer(segment.view, np.float32)[:] = step
        writer.send(Slot(step, segment.num_bytes), segment)
        attempt = NewAttempt(session, step, new_ulid(system_clock()))
        writer.send(
            SaveJob(
                number=step, slot=step, attempt=attempt, created_at=system_clock(),
                slices=[SliceRow("model/w", "float32", (count,), (0, count), 0)], aliases={},
                trees={"model": {"w": {"$": "tensor", "name": "model/w"}}}, local={}, metrics={}, lease=None,
            )
        )  # fmt: skip
        print("accepted", step, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
