"""`fit` of Keras on JAX and TensorFlow: killed in mid-epoch it continues bit for bit, with any data it shuffles."""

from __future__ import annotations

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.arrays.programs import Program, copy_of
from tests.arrays.test_training import ctl
from tests.support.ports import free_port

_OWN = re.compile(r"[0-9]+ |epoch |weights ")
_LOSS = re.compile(r"loss=(\S+)")
SAVED = 16  # by steps of four; an epoch has seven
KILLED = 18


def outputs(backend: str, folder: Path, run: str, kill_at: int, *options: str) -> list[str]:
    """The lines that the program prints, in a process of its own."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    with Program(backend, "tests.arrays.train_keras", log, folder, run, kill_at, *options) as program:
        lines = program.lines(-signal.SIGKILL if kill_at else 0)
    return [line for line in lines if _OWN.match(line)]


def resumes_exactly(backend: str, folder: Path, *options: str) -> None:
    """Kill a run, resume it, and compare it with one without this project."""
    whole = outputs(backend, folder, "plain", 0, "plain", *options)
    killed = outputs(backend, folder, "r", KILLED, *options)
    rest = outputs(backend, folder, "r", 0, *options)
    assert killed == whole[: len(killed)]
    assert rest[0].startswith(f"{SAVED + 1} ")
    assert rest == whole[-len(rest) :]


@pytest.mark.parametrize("data", ["arrays", "batches"])
def test_jax_under_another_seed(tmp_path: Path, data: str) -> None:
    resumes_exactly("jax", tmp_path, data)


@pytest.mark.parametrize("data", ["arrays", "batches", "dataset", "filtered", "endless"])
def test_tensorflow(tmp_path: Path, data: str) -> None:
    resumes_exactly("tensorflow", tmp_path, data)


def test_a_shuffle_without_a_seed_is_warned_of(tmp_path: Path) -> None:
    for run, options in (("a", ("unseeded", "dataset")), ("b", ("unseeded", "endless")), ("c", ("dataset",))):
        outputs("tensorflow", tmp_path, run, 0, *options)
    said = [log.read_text().count("tf.data shuffles without a seed") for log in sorted(tmp_path.glob("*.err"))]
    assert said == [1, 1, 0]


def test_epochs_that_are_shorter_than_the_data_are_refused_unless_they_are_endless(tmp_path: Path) -> None:
    """Each would go on where the one before ended; a resume began the data again."""
    with Program("tensorflow", "tests.arrays.train_keras", tmp_path / "log", tmp_path, "r", 0, "short") as program:
        program.lines(1)
    assert "InvalidRequest: an epoch of 2 steps ends before the data" in (tmp_path / "log.err").read_text()


@pytest.mark.parametrize("data", ["arrays", "endless"])
def test_mirrored_over_two_devices(tmp_path: Path, data: str) -> None:
    resumes_exactly("tensorflow", tmp_path, data, "mirrored")


def test_central_storage_and_on_from_there_under_another_strategy(tmp_path: Path) -> None:
    """Sums over two devices round in another way: losses are close, not equal."""
    whole = outputs("tensorflow", tmp_path, "plain", 0, "plain", "central")
    outputs("tensorflow", tmp_path, "r", KILLED, "central")
    copy = copy_of(tmp_path, tmp_path / "copy", "r", SAVED)
    same = outputs("tensorflow", tmp_path, "r", 0, "central")
    assert same[0].startswith(f"{SAVED + 1} ")
    assert same == whole[-len(same) :]
    other = outputs("tensorflow", copy, "r", 0, "central", "mirrored")
    assert other[0].startswith(f"{SAVED + 1} ")
    losses = [[float.fromhex(one) for one in _LOSS.findall("\n".join(lines))] for lines in (same, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_operators_can_use_it(tmp_path: Path) -> None:
    outputs("tensorflow", tmp_path, "r", 0)
    listed = json.loads(ctl("ls", "r", "--store", tmp_path, "-o", "json"))
    assert [one["step"] for one in listed][:2] == [21, 20]
    assert "loss" in listed[0]["metrics"]
    shown = ctl("show", "r@21", "--store", tmp_path)
    assert "weights/first/kernel" in shown
    assert "optimizer/first_kernel_velocity" in shown
    ctl("verify", "r@21", "--store", tmp_path)
    target = tmp_path / "weights.safetensors"
    ctl("export", "r@21", "--to", target, "--names", "weights/*", "--store", tmp_path)
    exported, expected = load_file(target), np.load(tmp_path / "r.npz")
    assert {name.removeprefix("weights/") for name in exported} == set(expected)
    assert all(np.array_equal(exported[f"weights/{name}"], expected[name]) for name in expected)
    ctl("prune", "r", "--keep", "1", "--yes", "--grace", "0s", "--store", tmp_path)
    assert [one["step"] for one in json.loads(ctl("ls", "r", "--store", tmp_path, "-o", "json"))] == [21]


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_names_that_are_not_public(tmp_path: Path, backend: str) -> None:
    with Program(backend, "tests.ckpt.integrations.pins", tmp_path / "log", "keras") as program:
        program.lines()


PROGRAM = "tests.arrays.train_keras_loop"
LOOP_SAVED, LOOP_KILLED = 6, 7  # saved at every third step


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
    step, _, digest = lines[1 + LOOP_SAVED].split()
    assert int(step) == LOOP_SAVED
    return digest


def test_a_coordinator_of_parameter_servers_continues_exactly(tmp_path: Path) -> None:
    whole = alone(tmp_path, "whole", 0, "server")
    killed = alone(tmp_path, "r", LOOP_KILLED, "server")
    rest = alone(tmp_path, "r", 0, "server")
    assert killed == whole[: 2 + LOOP_KILLED]
    assert restored(rest) == saved(killed)
    assert rest[1:] == whole[2 + LOOP_SAVED :]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """The folder of a killed job of two workers, and what they printed."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, two_workers(folder, "r", LOOP_KILLED)


def test_two_workers_continue_exactly(tmp_path: Path, killed: tuple[Path, list[list[str]]]) -> None:
    """Moving averages of normalization differ between workers; the others get the chief's."""
    folder, before = killed
    whole = two_workers(tmp_path, "whole", 0)
    rest = two_workers(copy_of(folder, tmp_path / "store", "r", LOOP_SAVED), "r", 0)
    assert before[0] == whole[0][: 2 + LOOP_KILLED]
    assert restored(rest[0]) == restored(rest[1]) == saved(before[0])
    assert rest[0][1:] == whole[0][2 + LOOP_SAVED :]
    losses = [[line.split()[1] for line in lines] for lines in (rest[1][1:], whole[1][2 + LOOP_SAVED :])]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", ["one", "mirrored", "server"])
def test_another_strategy_restores_their_save(
    tmp_path: Path, killed: tuple[Path, list[list[str]]], strategy: str
) -> None:
    folder, before = killed
    rest = alone(copy_of(folder, tmp_path / "store", "r", LOOP_SAVED), "r", 0, strategy)
    assert restored(rest) == saved(before[0])
    assert len(rest) == 6
