"""A loop of flax and optax that is killed in mid-epoch continues bit for bit, as one process and as two."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
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
from tests.support.ports import free_port

STEPS, KILL_AT = 16, 8  # an epoch has 6


def train(store: Path, kill_at: int = -1, processes: int = 1) -> list[list[str]]:
    """The lines of each process."""
    port, files = str(free_port()), [store.with_name(f"{store.name}-{kill_at}-{rank}") for rank in range(processes)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.arrays.train_jax", str(store), str(STEPS), str(kill_at), str(rank),
             str(processes), port, str(file)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}"},
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    try:
        for one in started:
            _, errors = one.communicate(timeout=300)
            # The end of one process takes the others of a job of JAX with it.
            assert (one.returncode == 0) == (kill_at < 0), errors
    finally:
        for one in started:
            one.kill()
            one.communicate()
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
    killed = train(tmp_path, KILL_AT, processes)
    rest = train(tmp_path, processes=processes)
    for all_of_it, before, after in zip(whole, killed, rest, strict=True):
        assert len(all_of_it) == STEPS + 1
        assert all_of_it[-1].endswith("False")  # without torch
        assert before == all_of_it[: KILL_AT + 1]
        assert after == all_of_it[KILL_AT + 1 :]


def test_what_one_process_saved_is_restored_by_two(
    uninterrupted: Callable[[int], tuple[Path, list[list[str]]]],
) -> None:
    """They have no step left to train, and report the weights: each those of its two devices."""
    store, _ = uninterrupted(1)
    two = train(store, processes=2)
    mesh = Mesh(np.array(jax.devices()[:4]), ("all",))
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
    command = [sys.executable, "-m", "ckptctl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_two_processes_saved_is_restored_by_one_on_other_devices_and_exported(store: Path, tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices()), ("all",))
    with ckpt.Checkpointer(str(store), run="jax", writer="thread") as checkpointer:
        state, start = restore(begin(mesh), checkpointer=checkpointer)
    assert start == STEPS
    assert int(state.step) == STEPS
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


def test_the_command_line_knows_it(store: Path) -> None:
    listed = json.loads(ctl("ls", "jax", "--store", store, "-o", "json"))
    assert len(listed) == STEPS
    assert "state/params/Dense_0/kernel" in ctl("show", f"jax@{STEPS - 1}", "--store", store)
    ctl("verify", f"jax@{STEPS - 1}", "--store", store)
    ctl("prune", "jax", "--keep", "2", "--yes", "--grace", "0s", "--store", store)
    left = json.loads(ctl("ls", "jax", "--store", store, "-o", "json"))
    assert [one["step"] for one in left] == [STEPS - 1, STEPS - 2]
