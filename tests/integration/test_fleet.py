"""Commands on many runs, on real engines: a Slurm cluster of this host, and Dask whose workers are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptstore.names import UNITS_PREFIX, RunKeys
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import flip, write_checkpoint
from tests.support.command_line import PROGRAM, invoke
from tests.support.dask_cluster import running_dask
from tests.support.slurm import is_missing, running_slurm, wait_for_jobs
from tests.support.waiting import wait_until

RUNS, STEPS = (int(number) for number in os.environ.get("CKPTD_FLEET", "12x4").split("x"))


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Runs of two teams, with one damaged checkpoint."""
    folder = tmp_path / "fleet"
    store = open_store(str(folder))
    for run in range(RUNS):
        for step in range(STEPS):
            weights = np.random.default_rng(run * STEPS + step).random(1000, np.float32)
            made = write_checkpoint(store, f"team-{'ab'[run % 2]}/{run:03d}", step, arrays={"model/w": weights})
    flip(folder / RunKeys(made.run).shard(made.attempt, "shard-00000.ckpt"), 100)
    return folder


def found_by(bodies: Any) -> dict[str, Any]:
    """The results by checkpoint; each is there once."""
    found = {body["id"]: body for body in bodies}
    assert len(found) == len(bodies)
    return found


def findings(store: Store) -> dict[str, Any]:
    """What was recorded in the store, without when and by whom."""
    kept = {}
    for info in store.list(""):
        if "/verified/" in info.key or "/quarantine/" in info.key:
            document = json.loads(store.get(info.key).splitlines()[0])
            kept[info.key] = {name: document[name] for name in ("attempt", "num_chunks", "stored_bytes", "problems")}
    return kept


@pytest.mark.skipif(bool(is_missing()), reason=f"not installed: {', '.join(is_missing())}")
def test_the_tasks_of_a_slurm_array_do_what_a_serial_run_does(fleet: Path, tmp_path: Path) -> None:
    serial = found_by(invoke("verify", "team-*", "--store", fleet, "-o", "json").json)
    assert len(serial) == RUNS * STEPS
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running_slurm(Path(folder)) as environment:
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        command = [*PROGRAM, "scrub", "team-*", "--on", "slurm:cpu:8", "--store", str(fleet), "-o", "json"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True)
        assert "Submitted batch job" in done.stdout
        wait_for_jobs(environment)
    outputs = [path.read_text() for path in sorted(tmp_path.glob("slurm-*.out"))]
    assert len(outputs) == 8
    printed = [
        json.loads(text[text.index("[\n") if "[\n" in text else text.index("[]") :].partition("\n{")[0])
        for text in outputs
    ]
    (whole,) = (found_by(bodies) for bodies in printed if len(bodies) == RUNS * STEPS)
    assert whole == serial
    parts = [body["id"] for bodies in printed for body in bodies if len(bodies) < RUNS * STEPS]
    assert len(parts) == len(set(parts))
    store = open_store(str(fleet))
    assert len(findings(store)) == RUNS * STEPS
    assert not list(store.list(UNITS_PREFIX))


@pytest.fixture
def dask() -> Iterator[tuple[Any, str]]:
    with running_dask(2) as found:
        yield found


def test_workers_of_dask_that_are_killed_lose_nothing(fleet: Path, dask: tuple[Any, str]) -> None:
    cluster, address = dask
    serial = found_by(invoke("verify", "team-*", "--store", fleet, "-o", "json").json)
    store, ended = open_store(str(fleet)), threading.Event()
    killed: list[int] = []

    def reached(count: int) -> bool:
        return ended.is_set() or len(list(store.list(UNITS_PREFIX))) >= count

    def kill() -> None:
        """Kill a worker whenever some more units are done, three times."""
        for count in (1, RUNS // 3, RUNS // 2):
            wait_until(partial(reached, count))
            alive = [nanny.pid for nanny in cluster.workers.values() if nanny.pid is not None]
            if not ended.is_set() and alive:
                os.kill(alive[0], signal.SIGKILL)
                killed.append(alive[0])

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        done = invoke("scrub", "team-*", "--on", address, "--store", fleet, "-o", "json")
    finally:
        ended.set()
        killer.join()
    assert done.code == 5, done.stderr  # the damage
    assert found_by(done.json) == serial
    assert len(killed) == len(set(killed)) > 0
    assert len(findings(store)) == RUNS * STEPS
