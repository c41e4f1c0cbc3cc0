"""Time from exec to the end of the first step, of a trainer that restarts, by where its state comes from.

Each start is a fresh interpreter: imports, a model, its optimizer, a restore, a step. A trainer that restarts from
memory saves after its step and is killed, so that the next one finds its snapshot. Files are not in the page cache. The
limit is a start that restores nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from bench.bucket import running_bucket
from bench.measuring import REPETITIONS, Spread, forget_cached, in_turns, problem, sync_tree
from bench.peers.dcp import Dcp
from bench.peers.torch_save import TorchSave
from bench.report import Goal, Report
from bench.restarted import RUN
from bench.state import State, trained, wanted_bytes
from ckpt import Checkpointer

NOTHING, MEMORY = "no restore", "ckptd, memory"
PEERS = {"torch.load": TorchSave, "dcp": Dcp}
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Start:
    """The duration of one start, in seconds."""

    built_s: float
    restored_s: float
    stepped_s: float


@dataclass(slots=True)
class Way:
    """One way to start a trainer."""

    way: str
    store: str
    blocks: int
    retain_snapshot_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    saver: int | None = None

    def start(self) -> Start:
        """One start. Raises RuntimeError if a start from memory read from the store."""
        if Path(self.store).is_absolute():
            forget_cached(Path(self.store))
        began = monotonic()
        with self._running() as process:
            said = _line(process)
            if self.retain_snapshot_s:
                previous, self.saver = self.saver, int(_line(process)["saver"])
                if previous is not None and said["read"]["store"]:
                    raise RuntimeError(f"read {said['read']} instead of memory alone")
        return Start(said["built_at"] - began, said["restored_at"] - said["built_at"], said["stepped_at"] - began)

    def digest(self) -> str:
        """Digest of the state that is restored."""
        with self._running("--digest") as process:
            return str(_line(process)["digest"])

    def close(self) -> None:
        """End the saver that keeps memory."""
        if self.saver is not None:
            with suppress(ProcessLookupError):
                os.kill(self.saver, signal.SIGKILL)

    @contextmanager
    def _running(self, *flags: str) -> Iterator[subprocess.Popen[str]]:
        arguments = [self.way, self.store, str(self.blocks), str(self.retain_snapshot_s), *flags]
        command = [sys.executable, "-m", "bench.restarted", *arguments]
        environment = {**os.environ, **self.environment}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
            try:
                yield process
            finally:
                process.kill()
        sleep(1.0)  # its saver ends, or frees what it does not keep


def measure(quick: bool) -> Report:
    """In a folder of the default temporary file system, and with SeaweedFS on this machine."""
    state = trained("fp32", wanted_bytes(quick))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckptd-bench-")))
        ways, problems = _ways(state, folder, stack)
        want = state.digest()
        for name, way in ways.items():
            if name != NOTHING and way.digest() != want:
                problems[name] = "the restored state differs from the saved one"
        starts: dict[str, Callable[[], Start]] = {n: w.start for n, w in ways.items() if n not in problems}
        if MEMORY in starts:
            starts[MEMORY]()  # the first one restores from the store
        found, failed = in_turns(starts)
    return _report(state, found, problems | failed)


def _ways(state: State, folder: Path, stack: ExitStack) -> tuple[dict[str, Way], dict[str, str]]:
    """All ways to start, after the state was saved for each; and the errors of peers."""
    blocks, problems = len(state.model.blocks), dict[str, str]()
    ways = {NOTHING: Way("nothing", "-", blocks)}
    service = stack.enter_context(running_bucket())
    places: dict[str, tuple[str, Mapping[str, Any], Mapping[str, str]]] = {
        "ckptd, disk": (str(folder / "ours"), {}, {}),
        "ckptd, S3": (service.url("restart"), service.options, service.s3.environment),
    }
    for name, (store, options, environment) in places.items():
        _save(store, state, options)
        ways[name] = Way("ckptd", store, blocks, environment=environment)
    store = str(folder / "memory")
    _save(store, state, {})
    ways[MEMORY] = way = Way("ckptd", store, blocks, retain_snapshot_s=600.0)
    stack.callback(way.close)
    for name, peer in PEERS.items():
        try:
            peer().save(state, folder / name)
        except Exception as error:  # a peer may raise anything
            problems[name] = problem(error)
        else:
            ways[name] = Way(name, str(folder / name), blocks)
    sync_tree(folder)
    return ways, problems


def _save(store: str, state: State, options: Mapping[str, Any]) -> None:
    with Checkpointer(store, run=RUN, slots=1, compress="off", options=options) as checkpointer:
        checkpointer.save(state.model, state.optim, 1)


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the trainer ended with {process.wait()}")
    found: dict[str, Any] = json.loads(line)
    return found


def _report(state: State, found: Mapping[str, list[Start]], problems: Mapping[str, str]) -> Report:
    def seconds(name: str) -> float:
        return median(start.stepped_s for start in found[name]) if name in found else float("nan")

    best = min((seconds(name) for name in PEERS if name in found), default=float("nan"))
    return Report(
        bench="restart",
        what=f"{state.num_bytes / 1e9:.2f} GB, from exec to the end of the first step, in seconds, median (quartiles) "
        f"of {REPETITIONS} in turns",
        columns=("", "first step", "imported and built", "restored after that"),
        rows=[
            (name, *(str(Spread.of([getattr(start, part) for start in starts])) for part in _PARTS))
            for name, starts in sorted(found.items(), key=lambda item: seconds(item[0]))
        ],
        goals=[
            Goal("fastest peer", MEMORY, best / seconds(MEMORY), 1.0, "at least"),
            Goal(NOTHING, MEMORY, seconds(NOTHING) / seconds(MEMORY), 0.8, "at least"),
        ],
        limit=seconds(NOTHING),
        peers={name: seconds(name) for name in PEERS if name in found},
        problems=problems,
        state_bytes=state.num_bytes,
        facts={f"{name}, seconds": seconds(name) for name in found},
    )


_PARTS = ("stepped_s", "built_s", "restored_s")
