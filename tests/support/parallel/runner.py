"""Scenarios in real ranks: functions that run in every process of a group and return something JSON can hold."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.support.forking import TRAINER, Fork, fork

HOST = "tests.support.parallel.host"
_Name = TypeVar("_Name")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A function ("package.module:name") that each of `world_size` ranks calls with these arguments.

    With more than one rank there is a gloo group; with one there is none. Its store is a file, or with `tcp` a
    server in rank 0.
    """

    function: str
    world_size: int
    arguments: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 60.0
    lost: tuple[int, ...] = ()
    """Ranks that kill or stop themselves. Nothing is expected of them; their result is None."""
    tcp: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What every rank returned, or what was printed by the ranks of a scenario that failed."""

    results: list[Any]
    error: str | None

    def result(self) -> list[Any]:
        """By rank. Raises AssertionError with the output if the scenario failed."""
        if self.error is not None:
            raise AssertionError(self.error)
        return self.results


def run_scenarios(scenarios: Sequence[Scenario], folder: Path, together: bool = False) -> list[Outcome]:
    """Run them in `folder`, which is empty or not there: one after the other, or all at the same time.

    One that fails or hangs spoils no other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scenarios.json").write_text(json.dumps([asdict(scenario) for scenario in scenarios]))
    limit = 60 + sum(scenario.timeout_s + 10 for scenario in scenarios)
    with (folder / "host.txt").open("w+") as output:
        arguments = [str(folder), *(["together"] if together else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        host = fork(TRAINER, HOST, arguments, stdout=output.fileno(), stderr=output.fileno(), environment=environment)
        try:
            code = host.wait(limit)
        finally:
            _kill_all(host)
        assert code == 0, (folder / "host.txt").read_text()
    return [_outcome(folder / str(number), scenario) for number, scenario in enumerate(scenarios)]


def run_named(scenarios: Mapping[_Name, Scenario], folder: Path, together: bool = False) -> dict[_Name, Outcome]:
    return dict(zip(scenarios, run_scenarios(list(scenarios.values()), folder, together), strict=True))


def run_scenario(scenario: Scenario, folder: Path) -> list[Any]:
    """By rank."""
    return run_scenarios([scenario], folder)[0].result()


def _outcome(place: Path, scenario: Scenario) -> Outcome:
    error = json.loads((place / "outcome.json").read_text())
    if error is not None:
        return Outcome([], error)
    results = [
        None if rank in scenario.lost else json.loads((place / f"rank-{rank}.json").read_text())
        for rank in range(scenario.world_size)
    ]
    return Outcome(results, None)


def _kill_all(host: Fork) -> None:
    """The host and whatever ranks it still has: they are a session of their own."""
    try:
        os.killpg(host.pid, signal.SIGKILL)
    except ProcessLookupError:  # all have ended, or the session does not exist yet
        host.kill()
    host.wait()


@contextmanager
def logged() -> Iterator[list[str]]:
    """In a rank: messages of warnings and errors, as they come."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("ckpt").removeHandler(handler)
