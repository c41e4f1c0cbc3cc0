"""Loops over Keras models under strategies of TensorFlow, killed and resumed; also under another strategy."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.arrays.programs import Program, copy_of
from tests.support.ports import free_port

PROGRAM = "tests.arrays.train_keras_loop"
SAVED, KILLED = 6, 7  # saved at every third step


def alone(folder: Path, run: str, kill_at: int, strategy: str) -> list[str]:
    """The lines of a program of one process."""
    log = folder / f"{strategy}-{run}-{kill_at}.log"
    with Program("tensorflow", PROGRAM, log, folder, run, kill_at, strategy) as program:
        return program.lines(-signal.SIGKILL if kill_at else 0)


def two_workers(folder: Path, run: str, kill_at: int) -> list[list[str]]:
    """The lines of both workers. The first one is the chief, whose end may take the other one with it."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as stack:
        programs = []
        for index in range(2):
            config = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}})
            log = folder / f"multi-{run}-{kill_at}-{index}.log"
            program = Program("tensorflow", PROGRAM, log, folder, run, kill_at, "multi", TF_CONFIG=config)
            programs.append(stack.enter_context(program))
        return [programs[0].lines(-signal.SIGKILL if kill_at else 0), programs[1].lines(None)]


def restored(lines: list[str]) -> str:
    """The digest of what a program has restored."""
    assert lines[0].startswith("restored ")
    return lines[0].split()[1]


def saved(lines: list[str]) -> str:
    """The digest at the step that was saved last."""
    step, _, digest = lines[1 + SAVED].split()
    assert int(step) == SAVED
    return digest


def test_a_coordinator_of_parameter_servers_continues_exactly(tmp_path: Path) -> None:
    whole = alone(tmp_path, "whole", 0, "server")
    killed = alone(tmp_path, "r", KILLED, "server")
    rest = alone(tmp_path, "r", 0, "server")
    assert killed == whole[: 2 + KILLED]
    assert restored(rest) == saved(killed)
    assert rest[1:] == whole[2 + SAVED :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder of a killed job of two workers, and what they printed."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, two_workers(folder, "r", KILLED)


def test_two_workers_continue_exactly(tmp_path: Path, killed: tuple[Path, list[list[str]]]) -> None:
    """Moving averages of normalization differ between workers; the others get those of the chief."""
    folder, before = killed
    whole = two_workers(tmp_path, "whole", 0)
    rest = two_workers(copy_of(folder, tmp_path / "store", "r", SAVED), "r", 0)
    assert before[0] == whole[0][: 2 + KILLED]
    assert restored(rest[0]) == restored(rest[1]) == saved(before[0])
    assert rest[0][1:] == whole[0][2 + SAVED :]
    losses = [[line.split()[1] for line in lines] for lines in (rest[1][1:], whole[1][2 + SAVED :])]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", ["one", "mirrored", "server"])
def test_another_strategy_restores_what_two_workers_saved(
    tmp_path: Path, killed: tuple[Path, list[list[str]]], strategy: str
) -> None:
    folder, before = killed
    rest = alone(copy_of(folder, tmp_path / "store", "r", SAVED), "r", 0, strategy)
    assert restored(rest) == saved(before[0])
    assert len(rest) == 6
