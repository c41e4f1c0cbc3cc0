"""A loop of flax and optax that is killed in mid-epoch continues bit for bit, as one process and as two."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file

import ckpt
from ckpt.integrations.jax import restore
from tests.arrays.train_jax import begin
from tests.support.command_line import succeed
from tests.support.daemons import running_daemon
from tests.support.forking import fork
from tests.support.ports import free_port

PROGRAM = "tests.arrays.train_jax"
STEPS, KILL_AT = 16, 8  # an epoch has 6


def train(store: Path, kill_at: int = -1, processes: int = 1) -> list[list[str]]:
    port, files = str(free_port()), [store.with_name(f"{store.name}-{kill_at}-{rank}") for rank in range(processes)]
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}"}
    with ExitStack() as stack:
        started = []
        for rank, file in enumerate(files):
            errors = stack.enter_context(file.with_suffix(".err").open("wb"))
            numbers = map(str, (STEPS, kill_at, rank, processes, port))
            started.append(
                fork(
                    (PROGRAM,), PROGRAM, [str(store), *numbers, str(file)],
                    stdout=errors.fileno(), stderr=errors.fileno(), environment=environment,
                )
            )  # fmt: skip
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
        for one, file in zip(started, files, strict=True):
            # The end of one process takes the others of a job of JAX with it.
            assert (one.wait(300) == 0) == (kill_at < 0), file.with_suffix(".err").read_text()
    return [file.read_text().splitlines() for file in files]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, list[list[str]]]]:
    """The store of a run without interruption, by number of processes, and what each of them wrote."""

    @cache
    def run(processes: int) -> tuple[Path, list[list[str]]]:
        folder = tmp_path_factory.mktemp(f"whole{processes}")
        return folder, train(folder, processes=processes)

    return run


@pytest.mark.parametrize("processes", [1, 2])
def test_a_killed_run_continues_bit_for_bit(
    tmp_path: Path, processes: int, uninterrupted: Callable[[int], tuple[Path, list[list[str]]]]
) -> None:
    _, whole = uninterrupted(processes)
    killed, rest = train(tmp_path, KILL_AT, processes), train(tmp_path, processes=processes)
    for all_of_it, before, after in zip(whole, killed, rest, strict=True):
        assert len(all_of_it) == STEPS + 1
        assert all_of_it[-1].endswith("False")  # without torch
        assert (before, after) == (all_of_it[: KILL_AT + 1], all_of_it[KILL_AT + 1 :])


def test_what_one_process_saved_two_restore(uninterrupted: Callable[[int], tuple[Path, list[list[str]]]]) -> None:
    """They have no step left to train, and report the weights: each those of its two devices."""
    store, _ = uninterrupted(1)
    two, mesh = train(store, processes=2), Mesh(np.array(jax.devices()[:4]), ("all",))
    with ckpt.Checkpointer(str(store), run="jax", writer="thread") as checkpointer:
        state, _ = restore(begin(mesh), checkpointer=checkpointer)
    for rank, lines in enumerate(two):
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves((state.params, state.opt_state)):
            for shard in leaf.addressable_shards[2 * rank : 2 * rank + 2]:
                digest.update(np.asarray(shard.data).tobytes())
        assert lines == [f"weights {digest.hexdigest()} False"]


@pytest.fixture
def store(uninterrupted: Callable[[int], tuple[Path, list[list[str]]]]) -> Path:
    return uninterrupted(2)[0]


def ctl(*arguments: object) -> str:
    return succeed(*arguments).stdout


def test_what_two_processes_saved_is_restored_by_one_on_other_devices_and_exported(store: Path, tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    with ckpt.Checkpointer(str(store), run="jax", writer="thread") as checkpointer:
        state, start = restore(begin(mesh), checkpointer=checkpointer)
    assert (start, int(state.step)) == (STEPS, STEPS)
    assert len(state.params["Dense_0"]["kernel"].sharding.device_set) == 8
    target = tmp_path / "out.safetensors"
    ctl("export", f"jax@{STEPS - 1}", "--to", target, "--store", store)
    exported = load_file(target)
    expected = {
        f"state/params/{layer}/{name}": np.asarray(leaf)
        for layer, held in state.params.items()
        for name, leaf in held.items()
    }
    adam = state.opt_state[1][0]
    expected |= {f"state/opt_state/1/0/mu/{k}/{n}": np.asarray(v) for k, d in adam.mu.items() for n, v in d.items()}
    expected |= {f"state/opt_state/1/0/nu/{k}/{n}": np.asarray(v) for k, d in adam.nu.items() for n, v in d.items()}
    expected["state/opt_state/1/0/count"] = np.asarray(adam.count)
    for name, value in expected.items():
        assert np.array_equal(exported[name], value), name
    assert expected.keys() <= exported.keys()


def test_the_command_line_and_a_daemon_know_it(store: Path) -> None:
    last = f"jax@{STEPS - 1}"
    # A new interpreter: hosts of forks also have what this environment lacks.
    with running_daemon(str(store), environment={**os.environ, "TZ": "UTC"}) as daemon:
        latest = daemon.get("/checkpoints/latest", params={"run": "jax"})
        assert (latest.status_code, latest.json()["step"]) == (200, STEPS - 1)
        for place in (("--store", store), ("--url", daemon.url)):
            assert len(json.loads(ctl("ls", "jax", *place, "-o", "json"))) == STEPS
            assert "state/params/Dense_0/kernel" in ctl("show", last, *place)
            ctl("verify", last, *place)
        ctl("prune", "jax", "--keep", "2", "--yes", "--grace", "0s", "--url", daemon.url)
    left = json.loads(ctl("ls", "jax", "--store", store, "-o", "json"))
    assert [one["step"] for one in left] == [STEPS - 1, STEPS - 2]
