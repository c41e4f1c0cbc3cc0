"""Predictions of a plan against what happens: size and time until durable of a run's next saves.

A run trains and saves. The history of its first saves predicts the next ones, as `ckptctl plan --from` does. The same
is predicted without any history, from a measurement of the store, as `--measure` does; that is a fact without a goal,
because it knows neither the speed of the encoder nor that of the commit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from bench.ours import Ours
from bench.report import Goal, Report
from bench.slowdown import Trainer
from bench.state import trained, wanted_bytes
from ckptplan.history import contents, history
from ckptplan.plan import Plan, plan
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.commits.store_speed import measure_store
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store

SIZE_GOAL = 0.01
DURABLE_GOAL = 0.30
HISTORY = 5
"""Saves before the prediction; the first one prepares memory."""
PREDICTED = 5
STEPS_BETWEEN = 2
MEASURED_BYTES = 256 << 20


def measure(quick: bool) -> Report:
    """One run of a process with one training thread, on the default temporary file system."""
    num_bytes = wanted_bytes(quick)
    state = trained("fp32", num_bytes)
    trainer = Trainer(state)
    with tempfile.TemporaryDirectory() as folder:
        speed = measure_store(open_store(folder), system_clock, min(MEASURED_BYTES, num_bytes + (32 << 20)))
        ours = Ours(Path(folder))
        try:
            for _ in range(1 + HISTORY):
                _save(ours, trainer)
            source = StoreSource(open_store(ours.store))
            planned = _plan(source)
            saved = [_save(ours, trainer) for _ in range(PREDICTED)]
        finally:
            ours.close()
    return report(planned, saved, speed.write_bytes_per_s)


def _save(ours: Ours, trainer: Trainer) -> Checkpoint:
    trainer.steps(STEPS_BETWEEN)
    ours.steps += 1
    handle = ours.checkpointer.save_async(trainer.state.model, trainer.state.optim, ours.steps)
    trainer.steps(STEPS_BETWEEN)
    return handle.result()


def _plan(source: StoreSource) -> Plan:
    newest, *earlier = source.checkpoints("bench")
    model, terms = contents(newest, read_manifest(source, newest).content)
    found = history([newest, *earlier])
    return plan(model=model, terms=terms, durable_s=found.durable_s, dp=newest.world_size)


def report(planned: Plan, saved: list[Checkpoint], write_bytes_per_s: float) -> Report:
    """Deviations of the prediction from the saves after it."""
    actual_s = median(one.save_seconds for one in saved)
    predicted_s = planned.interval.durable_s or 0.0
    of_size = max(abs(planned.size.stored_bytes / one.needed_bytes - 1) for one in saved)
    of_time = abs(predicted_s / actual_s - 1)
    from_store_s = planned.size.stored_bytes / write_bytes_per_s
    sizes = ", ".join(f"{one.needed_bytes / 1e6:.1f}" for one in saved)
    times = ", ".join(f"{one.save_seconds:.2f}" for one in saved)
    return Report(
        bench="predict",
        what=f"the next {PREDICTED} saves of a run, from the history of {HISTORY}",
        columns=("", "predicted", "actual", "deviation"),
        rows=[
            ("stored MB", f"{planned.size.stored_bytes / 1e6:.1f}", sizes, f"{of_size:.2%}"),
            ("s until durable", f"{predicted_s:.2f}", times, f"{of_time:.1%} of the median"),
            ("s until durable, from the store's speed", f"{from_store_s:.2f}", f"{actual_s:.2f}", ""),
        ],
        goals=[
            Goal("size, deviation", "next saves", of_size, SIZE_GOAL, "at most"),
            Goal("time until durable, deviation", "next saves", of_time, DURABLE_GOAL, "at most"),
        ],
        state_bytes=saved[0].raw_bytes,
        facts={
            "predicted_s": predicted_s,
            "actual_s": actual_s,
            "from_store_s": from_store_s,
            "write_bytes_per_s": write_bytes_per_s,
        },
    )
