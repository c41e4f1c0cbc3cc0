"""Predictions of a plan against what happens: size and time until durable of a run's next save.

A run trains and saves. Its history predicts the next save, as `ckptctl plan --from` does, before each of several saves.
Single saves vary with the load of the machine, which no history knows: so for the time the median of the deviations
counts, and their 90th percentile and the deviation of the medians are reported. The same is predicted without any
history, from a measurement of the store, as `--measure` does; that is a fact without a goal, because it knows neither
the speed of the encoder nor that of the commit.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from bench.ours import Ours
from bench.report import Goal, Report
from bench.slowdown import Trainer
from bench.state import trained, wanted_bytes
from ckptplan.history import contents, history
from ckptplan.plan import Plan, plan
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import Checkpoint
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from ckptstore.stores.checks import measure_store

SIZE_GOAL = 0.01
DURABLE_GOAL = 0.30
HISTORY = 5
"""Saves before the prediction; the first one prepares memory."""
PREDICTED = 9
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
            pairs = [(_plan(source), _save(ours, trainer)) for _ in range(PREDICTED)]
        finally:
            ours.close()
    return report(pairs, speed.write_bytes_per_s)


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


def report(pairs: list[tuple[Plan, Checkpoint]], write_bytes_per_s: float) -> Report:
    """Deviations of each prediction from the save after it."""
    predicted = [planned.interval.durable_s or 0.0 for planned, _ in pairs]
    actual = [one.save_seconds for _, one in pairs]
    of_size = max(abs(planned.size.stored_bytes / one.needed_bytes - 1) for planned, one in pairs)
    of_time = [abs(before / after - 1) for before, after in zip(predicted, actual, strict=True)]
    of_medians = abs(median(predicted) / median(actual) - 1)
    half, most = np.percentile(of_time, (50, 90)).tolist()
    last, saved = pairs[-1]
    from_store_s = last.size.stored_bytes / write_bytes_per_s
    seconds = ", ".join(f"{one:.2f}" for one in actual)
    return Report(
        bench="predict",
        what=f"the next save of a run, {PREDICTED} times",
        columns=("", "predicted", "actual", "deviation"),
        rows=[
            (
                "stored MB",
                f"{last.size.stored_bytes / 1e6:.1f}",
                f"{saved.needed_bytes / 1e6:.1f}",
                f"{of_size:.2%} at most",
            ),
            (
                "s until durable",
                ", ".join(f"{one:.2f}" for one in predicted),
                seconds,
                f"{half:.1%}, median; p90 {most:.1%}; of the medians {of_medians:.1%}",
            ),
            ("s until durable, from the store's speed", f"{from_store_s:.2f}", f"{median(actual):.2f}", ""),
        ],
        goals=[
            Goal("size, worst deviation", "next save", of_size, SIZE_GOAL, "at most"),
            Goal("time until durable, median deviation", "next save", half, DURABLE_GOAL, "at most"),
        ],
        state_bytes=saved.raw_bytes,
        facts={
            "predicted_s": median(predicted),
            "actual_s": median(actual),
            "p90 deviation": most,
            "deviation of the medians": of_medians,
            "worst deviation": max(of_time),
            "from_store_s": from_store_s,
            "write_bytes_per_s": write_bytes_per_s,
        },
    )
