"""Peak memory of a save and of a restore, in addition to the state itself.

Each contestant has its own process, and another one samples the proportional set sizes of it and of all its child
processes: shared memory counts once. A save counts from before the library makes anything, so arenas, staging buffers
and processes are included. A restore goes into the live tensors of the same process, which has that memory already.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from bench.measuring import memory, problem
from bench.ours import Ours
from bench.peers import SAVING, open_peers
from bench.peers.peer import Peer
from bench.report import Goal, Report
from bench.state import trained, wanted_bytes

SLOT_BYTES = 256 << 20
"""Allowed in addition to one state."""
RESTORE_GOAL = 0.1
TIMEOUT_S = 120
OURS = "ckptd"
QUICK_PEERS = ("torch.save", "dcp-thread", "torch_checkpointing", "torchsnapshot")


def measure(quick: bool) -> Report:
    """One contestant after the other, over a folder of the default temporary file system."""
    num_bytes = wanted_bytes(quick)
    names = (OURS, *(QUICK_PEERS if quick else SAVING))
    answers = {name: _in_fresh_process(name, num_bytes) for name in names}
    problems = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    return report({name: answer for name, answer in answers.items() if isinstance(answer, dict)}, problems, num_bytes)


def _in_fresh_process(name: str, num_bytes: int) -> dict[str, int] | str:
    """Its memory, or why it does not run."""
    command = [sys.executable, "-m", "bench.memory", name, str(num_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=TIMEOUT_S, text=True)
    if not done.stdout:
        return f"it ended with status {done.returncode}"
    answer: dict[str, int] | str = json.loads(done.stdout.splitlines()[-1])
    return answer


def report(found: dict[str, dict[str, int]], problems: dict[str, str], num_bytes: int) -> Report:
    """Peaks relative to the limit."""
    state_bytes = next((answer["state_bytes"] for answer in found.values()), num_bytes)
    nothing = {"save": float("nan"), "restore": float("nan")}
    ours = found.get(OURS, nothing)
    slot_ratio = ours["save"] / (state_bytes + SLOT_BYTES)
    return Report(
        bench="memory",
        what=f"peak on top of a state of {state_bytes / 1e6:.0f} MB",
        columns=("", "save", "save / state", "restore", "restore / state"),
        rows=[_row(name, answer, state_bytes) for name, answer in found.items()],
        goals=[
            Goal("save, one slot", "state + 256 MiB", slot_ratio, 1.0, "at most"),
            Goal("restore", "state", ours["restore"] / state_bytes, RESTORE_GOAL, "at most"),
        ],
        limit=0.0,
        peers={name: answer["save"] for name, answer in found.items() if name in SAVING},
        problems=problems,
        state_bytes=state_bytes,
        facts={f"{name}, restore": answer["restore"] for name, answer in found.items()}
        | {name: found[name]["save"] for name in (OURS,) if name in found},
    )


def _row(name: str, answer: dict[str, int], state_bytes: int) -> tuple[str, ...]:
    cells = ((f"{answer[key] / 1e6:.0f} MB", f"{answer[key] / state_bytes:.2f}") for key in ("save", "restore"))
    return (name, *(cell for pair in cells for cell in pair))


def alone(name: str, num_bytes: int) -> dict[str, int]:
    """Peak bytes of a save and a restore, in this process."""
    torch.set_num_threads(1)
    state = trained("fp32", num_bytes)
    want = state.digest()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        first, second = Path(folder, "1"), Path(folder, "2")
        with memory() as saving:
            peer = _open(name, num_bytes, Path(folder), stack)
            peer.save(state, first)
            peer.discard(first)
            peer.save(state, second)
        state.forget()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with memory() as restoring:
            peer.load(second, state)
        if state.digest() != want:
            raise ValueError("the restored state differs from the saved one")
    return {"save": saving.extra_bytes, "restore": restoring.extra_bytes, "state_bytes": state.num_bytes}


def _open(name: str, num_bytes: int, folder: Path, stack: ExitStack) -> Peer:
    if name == OURS:
        return stack.enter_context(Ours(folder))
    peers, problems = open_peers([name], stack)
    if name in problems:
        raise ImportError(problems[name])
    return peers[name]


def main() -> None:
    """Print the memory of one contestant, or its problem."""
    try:
        answer: dict[str, int] | str = alone(sys.argv[1], int(sys.argv[2]))
    except Exception as error:  # a peer may raise anything
        answer = problem(error)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
