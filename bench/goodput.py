"""The account of real runs (ckptctl goodput) beside a stopwatch: kills, a preemption, and a slow store.

Trainers are processes whose steps take a tenth of a second; they note every step, save and restore in a file. The
account sees nothing of it: it has the store alone. Steps that run while a save is under way may be slower; the
stopwatch cannot separate that, so productive time and slowdown are compared together. The slow store is an S3 service
behind a proxy with a round trip of 40 ms and 8 MB/s: a save takes longer than the steps until the next one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.report import Goal, Report
from bench.slow_store import slow_service
from ckptstore.analysis.goodput import Account, read_account
from ckptstore.run import Run
from ckptstore.stores import Store, open_store
from tests.support import seaweed

GOAL = 0.02
ROUND_TRIP_S, BYTES_PER_S = 0.04, 8e6
_PAUSE_S = 3.0
KINDS = ("productive", "stall", "restore", "restart", "lost", "waiting")

Log = list[dict[str, Any]]


@dataclass(slots=True)
class _Life:
    began_at: float
    ended_at: float
    log: Log


def measure(quick: bool) -> Report:
    """Three runs of three attempts each."""
    steps = 120 if quick else 400
    runs = {
        "kills": _run_on_disk([signal.SIGKILL, signal.SIGKILL], steps),
        "preemption": _run_on_disk([signal.SIGTERM, signal.SIGKILL], steps),
        "slow store": _run_on_slow_store([signal.SIGKILL, signal.SIGKILL], steps),
    }
    rows, goals = [], []
    facts: dict[str, Any] = {}
    for name, (found, truth) in runs.items():
        total = sum(truth.values())
        account = _seconds(found)
        worst = max(abs(account[kind] - truth[kind]) for kind in KINDS) / total
        goals.append(Goal(f"{name}, largest deviation of a category", "all time", worst, GOAL, "at most"))
        for kind in KINDS:
            rows.append((name, kind, f"{truth[kind]:.2f} s", f"{account[kind]:.2f} s"))
            facts |= {f"{name}, {kind}, stopwatch": truth[kind], f"{name}, {kind}, account": account[kind]}
        rows.append((name, "attempts", "", ", ".join(one.ended for one in found.attempts)))
        facts |= {f"{name}, goodput": found.goodput, f"{name}, steps done twice": found.lost_steps}
    return Report(
        bench="goodput",
        what=f"three runs of {steps} steps and three attempts; heartbeats each second",
        columns=("run", "category", "stopwatch", "account"),
        rows=rows,
        goals=goals,
        facts=facts,
    )


def _seconds(found: Account) -> dict[str, float]:
    seconds = dict(found.seconds)
    seconds["productive"] += seconds.pop("slowdown")
    return seconds


_Found = tuple[Account, dict[str, float]]


def _run_on_disk(signals: list[signal.Signals], steps: int) -> _Found:
    with tempfile.TemporaryDirectory() as folder:
        return _run(signals, steps, folder, {}, open_store(folder))


def _run_on_slow_store(signals: list[signal.Signals], steps: int) -> _Found:
    url = f"s3://{seaweed.BUCKET}/{uuid4().hex}"  # a trainer remembers what it restored from which URL
    with slow_service(ROUND_TRIP_S, BYTES_PER_S) as (slow, direct, _):
        return _run(signals, steps, url, slow.environment, open_store(url, direct.options))


def _run(signals: list[signal.Signals], steps: int, url: str, environment: Mapping[str, str], store: Store) -> _Found:
    with tempfile.TemporaryDirectory() as folder:
        lives = []
        for number, how in enumerate([*signals, None]):
            log = Path(folder, f"log-{number}")
            stop_at = steps * (number + 1) // 3 + 7
            lives.append(_live(url, environment, log, steps, how, stop_at))
            if how is not None:
                time.sleep(_PAUSE_S)
        return read_account(Run(store, "run")), _truth(lives)


def _live(
    url: str, environment: Mapping[str, str], log: Path, steps: int, how: signal.Signals | None, stop_at: int
) -> _Life:
    """One attempt, which gets the signal after a step."""
    began_at = time.time()
    command = [sys.executable, "-m", "bench.goodput_trainer", url, str(log), str(steps)]
    with subprocess.Popen(command, env={**os.environ, **environment}) as trainer:
        if how is not None:
            _wait(lambda: any(one.get("step", 0) >= stop_at for one in _read(log)), trainer)
            trainer.send_signal(how)
        trainer.wait(300)
    notes = _read(log)
    # One that has closed ends there: the interpreter takes seconds to exit, in which nothing trains.
    closed = [one["at"] for one in notes if one["kind"] == "closed"]
    ended_at = closed[0] if closed else time.time()
    return _Life(began_at, ended_at, notes)


def _wait(condition: Callable[[], bool], trainer: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while not condition():
        if trainer.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the trainer ended before its time")
        time.sleep(0.01)


def _read(path: Path) -> Log:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _truth(lives: list[_Life]) -> dict[str, float]:
    """Seconds by category. All attempts resume from the one before."""
    found = dict.fromkeys(KINDS, 0.0)
    for number, life in enumerate(lives):
        (restored,) = (one for one in life.log if one["kind"] == "restored")
        after = lives[number + 1] if number + 1 < len(lives) else None
        cut = life.ended_at
        if after is not None:
            found["waiting"] += after.began_at - life.ended_at
            resumed = next(one["step"] for one in after.log if one["kind"] == "restored")
            cut = next(one["at"] for one in life.log if one["kind"] == "step" and one["step"] == resumed)
            if any(one["kind"] == "closed" for one in life.log):
                cut = life.ended_at  # it closed after its last save
        found["restore"] += restored["seconds"]
        found["restart"] += restored["at"] - life.began_at - restored["seconds"]
        found["lost"] += life.ended_at - cut
        stall = sum(one["seconds"] for one in life.log if one["kind"] == "saved" and one["at"] <= cut)
        closing = [one["at"] for one in life.log if one["kind"] == "closing"]
        stall += cut - closing[0] if closing else 0.0
        found["stall"] += stall
        found["productive"] += cut - restored["at"] - stall
    return found
