"""Four replicas restore the same state from S3: bytes sent by the store, and the time until all are done.

Broadcast: one rank reads each byte and passes it on through the process group (gloo). Daemon: all read through ckptd
and its cache, which is empty at first. Alone: each reads everything. The service itself counts the bytes that it
sends.
"""

from __future__ import annotations

import json
from typing import Any

from bench.bucket import Service, running_bucket
from bench.measuring import REPETITIONS, Spread, output_of_ranks
from bench.report import Goal, Report
from bench.state import trained, wanted_bytes
from ckpt import Checkpointer

GOAL = 1.05
RANKS = 4
MODES = ("broadcast", "daemon", "alone")
RUN = "bench"
_TIMEOUT_S = 900.0


def measure(quick: bool) -> Report:
    """Ranks, daemon and SeaweedFS share the cores."""
    num_bytes = wanted_bytes(quick)
    with running_bucket() as service:
        state = trained("fp32", num_bytes)
        url = service.url("replicas")
        with Checkpointer(url, run=RUN, options=service.options, slots=1) as checkpointer:
            checkpoint = checkpointer.save(state.model, state.optim, 1)
        size, digest = state.num_bytes, state.digest()
        del state
        found = run_ranks(service, {"url": url, "num_bytes": num_bytes, "digest": digest})
    seconds = {mode: Spread.of([one["seconds"] for one in found[mode]]) for mode in MODES}
    shares = {mode: max(one["sent_bytes"] for one in found[mode]) / checkpoint.stored_bytes for mode in MODES}
    return Report(
        bench="replicas",
        what=f"{RANKS} replicas of {size / 1e9:.2f} GB, {checkpoint.stored_bytes / 1e9:.2f} GB stored; all on the same "
        f"cores; {REPETITIONS} repetitions in turns",
        columns=("", "seconds until all have it", "most bytes sent by the store / stored bytes"),
        rows=[(mode, str(seconds[mode]), f"{shares[mode]:.3f}") for mode in MODES],
        goals=[
            Goal("bytes sent by the store, broadcast", "stored bytes", shares["broadcast"], GOAL, "at most"),
            Goal("bytes sent by the store, daemon", "stored bytes", shares["daemon"], GOAL, "at most"),
        ],
        state_bytes=size,
        facts={f"{mode}_s": seconds[mode].median for mode in MODES}
        | {f"{mode}_over_alone": seconds[mode].median / seconds["alone"].median for mode in MODES[:-1]},
    )


def run_ranks(service: Service, task: dict[str, Any]) -> dict[str, list[dict[str, float]]]:
    """Output of rank 0: by mode, seconds and sent bytes of each repetition."""
    task |= {"service": [service.s3.endpoint, service.s3.master, service.s3.metrics]}
    found: dict[str, list[dict[str, float]]] = output_of_ranks(
        "bench.replica_rank", RANKS, [json.dumps(task)], _TIMEOUT_S
    )
    return found
