"""ckptctl rehearse: programs with one fault each, and the examples, which have none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from ckptctl.commands import rehearse
from tests.support.command_line import Finished, invoke
from tests.support.forking import TRAINER, fork
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S

pytestmark = pytest.mark.slow

FAULTY = "tests.support.faulty_train"


class Forks:
    """The processes of a program, started as forks: in the way of subprocess.Popen, and of torchrun."""

    def __init__(self, command: Sequence[str], *, env: dict[str, str], stdout: IO[bytes], **_: Any) -> None:
        world_size = int(env.get("PET_NPROC_PER_NODE", "1"))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
        joins = world_size > 1 or command[0].removeprefix("examples.") in (
            "elastic",
            "ring_allreduce",
            "cifar_ddp",
            "fsdp2",
        )
        self.ranks = [
            fork(
                TRAINER, command[0], command[1:], stdout=stdout.fileno(), stderr=stdout.fileno(),
                environment={**env, **(meeting if joins else {}), "RANK": str(rank)},
            )
            for rank in range(world_size)
        ]  # fmt: skip
        self.pid = self.ranks[0].pid

    def poll(self) -> int | None:
        codes = [rank.poll() for rank in self.ranks]
        return next((code for code in codes if code), None if None in codes else 0)

    def wait(self) -> None:
        for rank in self.ranks:
            rank.wait(DEADLINE_S)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of the program costs a tenth of what a new interpreter does."""
    monkeypatch.setattr(rehearse, "Popen", Forks)


def rehearsed(tmp_path: Path, *command: object, kills: int = 1, ranks: int = 1, seed: int = 0) -> Finished:
    real = tmp_path / "real"
    options = ["--kills", kills, "--ranks", ranks, "--seed", seed, "--keep", tmp_path / "kept", "-o", "json"]
    done = invoke("rehearse", *options, "--", *(str(word).replace("STORE", str(real)) for word in command))
    assert not real.exists()
    return done


@pytest.mark.parametrize(
    ("fault", "cause", "named"),
    [
        ("loader", "loader", "batch"),
        ("generator", "generator", "variables/noise/generator"),
        ("noise of the data set", "generator", "variables/samples/noise/generator"),
        ("counter", "extras", "variables/curriculum/level"),
        ("average", "extras", "variables/average"),
        ("scheduler", "extras", "variables/sched/last_epoch"),
        ("moments", "optimizer", "optimizer/optim"),
        ("dummy step", "dummy_step", ""),
        ("seed", "random", "random/torch"),
        ("draw", "random", "random/torch"),
        ("head", "weights", "3.weight"),
        ("gradients", "gradients", "gradients"),
        ("clock", "nondeterministic", "model/0.weight"),
        ("no restore", "not_restored", ""),
        ("crash", "fails", "does not like this"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, fault: str, cause: str, named: str) -> None:
    done = rehearsed(tmp_path, FAULTY, fault, "STORE")
    assert done.code == 1, done.stdout + done.stderr
    assert done.json["finding"]["cause"] == cause, done.stdout
    assert not done.json["exact"]
    assert not named or any(named in name for name in done.json["finding"]["differs"]), done.stdout


def test_adapters_of_one_rank_are_named(tmp_path: Path) -> None:
    done = rehearsed(tmp_path, FAULTY, "adapter", "STORE", ranks=2)
    assert done.json["finding"]["cause"] == "one_rank", done.stdout
    assert any("adapter" in name for name in done.json["finding"]["differs"])


@pytest.mark.parametrize(("fault", "ranks"), [("none", 1), ("window", 1), ("none", 2)])
def test_a_program_without_a_fault_is_exact(tmp_path: Path, fault: str, ranks: int) -> None:
    done = rehearsed(tmp_path, FAULTY, fault, "STORE", kills=3, ranks=ranks, seed=3)
    assert done.code == 0, done.stdout + done.stderr
    assert all(kill["cost_s"] >= kill["resume_s"] > 0 for kill in done.json["kills"])


def test_a_folder_of_another_rehearsal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept/uninterrupted").mkdir(parents=True)
    done = rehearsed(tmp_path, FAULTY, "none", "STORE")
    assert done.code == 2
    assert "uninterrupted exists" in done.stderr


def test_a_program_that_fails_by_itself_is_refused_with_its_output(tmp_path: Path) -> None:
    done = rehearsed(tmp_path, FAULTY, "none", "too", "many", "arguments")
    assert done.code == 2
    assert "positional arguments" in done.stderr


EXAMPLES = [
    ("elastic", ["--store", "STORE"], 1),
    ("cifar_ddp", ["--store", "STORE"], 2),
    ("ring_allreduce", ["--store", "STORE", "--save-every", "3"], 2),
    ("parameter_server", ["--store", "STORE", "--save-every", "3"], 2),
    ("elastic", ["--store", "STORE"], 2),
    ("ring_allreduce", ["--store", "STORE", "--save-every", "3"], 1),
    ("cifar_ddp", ["--store", "STORE"], 1),
    ("fsdp2", ["--store", "STORE", "--steps", "100"], 1),
    ("fsdp2", ["--store", "STORE", "--steps", "100"], 2),
    ("pipeline", ["--store", "STORE", "--steps", "100"], 2),
    ("train_gpt", ["--store", "STORE", "--save-every", "3"], 1),
    ("train_gpt", ["--store", "STORE", "--save-every", "3"], 2),
    ("train_accelerate", ["STORE"], 1),
    ("train_lightning", ["STORE"], 1),
    ("train_transformers", ["STORE"], 1),
    ("train_torchtitan", ["STORE"], 1),
    ("train_keras", ["STORE"], 1),
]
"""Module, arguments and ranks. tests/integration/test_loops.py kills and resumes the third and the fourth."""
_MANY = os.environ.get("CKPTD_REHEARSALS") == "all"


@pytest.mark.parametrize(("example", "arguments", "ranks"), EXAMPLES if _MANY else EXAMPLES[:2])
def test_no_example_has_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str, arguments: list[str], ranks: int
) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    done = rehearsed(tmp_path, f"examples.{example}", *arguments, kills=5 if _MANY else 2, ranks=ranks)
    assert done.code == 0, done.stdout + done.stderr
    assert done.json["exact"]
    assert done.json["compared"]
    assert len(done.json["kills"]) >= 2
