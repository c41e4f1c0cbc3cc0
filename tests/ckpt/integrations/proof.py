"""What each integration must show, on real processes: a killed run resumes exactly, and operators can use the result.

A program of an integration trains a small model with dropout, a shuffling DataLoader and a scheduler:

    python -m PROGRAM FOLDER RUN KILL_AT OPTION...

It prints `STEP LOSS` for each step, with the loss as an exact float, and at the end `weights DIGEST`. KILL_AT: the
number of steps after which it kills itself; 0: never. OPTION plain: without this project, on the same seed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from tests.support.command_line import invoke, succeed
from tests.support.daemons import running_daemon
from tests.support.forking import Fork, fork, run

_END_S = 240.0
_SAVES = ("every=", "limit=", "epoch")
"""Options that say when to save."""


def report(step: int, loss: torch.Tensor) -> None:
    """In a program: one step."""
    print(step, float(loss).hex(), flush=True)


def report_weights(state: Mapping[str, torch.Tensor], folder: str, name: str) -> None:
    """In a program: the end. state: the framework's own state_dict, whole."""
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in state.items()}
    torch.save(state, Path(folder) / f"{name}-{os.environ.get('RANK', 0)}.pt")
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    print("weights", digest.hexdigest(), flush=True)


def die_after(step: int) -> None:
    """In a program: SIGKILL, if it is this step's turn."""
    if step == int(sys.argv[3]) != 0:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Integration:
    program: str
    imports: Sequence[str]

    def outputs(self, folder: Path, name: str, kill_at: int, *options: str, ranks: int = 1) -> list[list[str]]:
        """The lines that each rank prints. Raises AssertionError with the logs of a run that ends otherwise."""
        number = len(list(folder.glob("log-*")))
        logs = [folder / f"log-{number}-{rank}" for rank in range(ranks)]
        forks = [self._start(folder, logs, rank, [name, str(kill_at), *options]) for rank in range(ranks)]
        expected = -signal.SIGKILL if kill_at else 0
        try:
            first = forks[0].wait(_END_S)
            if kill_at:
                for other in forks[1:]:
                    other.kill()
            codes = [first, *(one.wait(_END_S) for one in forks[1:])]
        finally:
            for one in forks:
                one.kill()
                one.wait()
        texts = [log.with_suffix(".err").read_text() for log in logs]
        assert codes == [expected] * ranks, "\n".join([str(codes), *texts])
        own = re.compile(r"[0-9]+ |weights ")
        return [[line for line in log.read_text().splitlines() if own.match(line)] for log in logs]

    @functools.cache  # noqa: B019 - integrations are constants
    def plain(self, *options: str, ranks: int = 1) -> list[list[str]]:
        """The lines of a run without this project: of one run for all tests with the same options."""
        with tempfile.TemporaryDirectory() as folder:
            return self.outputs(Path(folder), "none", 0, "plain", *options, ranks=ranks)

    def _start(self, folder: Path, logs: list[Path], rank: int, arguments: list[str]) -> Fork:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if len(logs) > 1:
            environment |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(logs)),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "MEETING": str(logs[0].with_suffix(".meeting")),
            }  # fmt: skip
        with logs[rank].open("wb") as out, logs[rank].with_suffix(".err").open("wb") as err:
            return fork(
                self.imports, self.program, [str(folder), *arguments],
                stdout=out.fileno(), stderr=err.fileno(), environment=environment,
            )  # fmt: skip

    def resumes_exactly(
        self, folder: Path, name: str, kill_at: int, *options: str, resumed_at: int, ranks: int = 1
    ) -> None:
        """Kill a run, resume it under another seed, and compare it with a run without this project."""
        plain = self.plain(*(one for one in options if not one.startswith(_SAVES)), ranks=ranks)
        self.outputs(folder, name, kill_at, *options, ranks=ranks)
        for lines, whole in zip(self.outputs(folder, name, 0, *options, ranks=ranks), plain, strict=True):
            expected = [line for line in whole if not line[0].isdigit() or int(line.split()[0]) >= resumed_at]
            assert len(lines) > 2
            assert lines == expected, "\n".join(["stored:", *map(str, (folder / name).rglob("*"))])


def private_names_exist(framework: str, integration: Integration) -> None:
    code, _, errors = run(integration.imports, "tests.ckpt.integrations.pins", [framework])
    assert code == 0, errors


def operators_can_use(folder: Path, name: str, own: Path, prefix: str = "model/") -> None:
    """List, show, verify, export and prune the checkpoints of a run, and ask a daemon for the newest.

    own: the framework's own state_dict of the newest checkpoint, in a file of torch's.
    """
    store = str(folder)
    newest = succeed("ls", name, "--store", store, "-o", "json").json[0]["id"]
    assert invoke("show", newest, "--store", store).code == 0
    assert invoke("verify", newest, "--store", store).code == 0
    with running_daemon(store) as daemon:
        assert daemon.get(f"/checkpoints/latest?run={name}").json()["id"] == newest
    to = folder / f"{name}.safetensors"
    succeed("export", newest, "--to", to, "--names", f"{prefix}*", "--store", store)
    from safetensors.torch import load_file

    exported, expected = load_file(to), torch.load(own, weights_only=True)
    assert {entry.removeprefix(prefix) for entry in exported} == set(expected)
    for entry, tensor in exported.items():
        assert torch.equal(tensor, expected[entry.removeprefix(prefix)]), entry
    succeed("prune", name, "--keep", "1", "--yes", "--grace", "0s", "--store", store)
    assert [one["id"] for one in invoke("ls", name, "--store", store, "-o", "json").json] == [newest]
