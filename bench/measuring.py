"""How things are measured: in turns, with medians and spread; processor time and memory as well as wall time."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

REPETITIONS = 5
SAMPLE_S = 0.02
"""Seconds between two samples of memory."""
IO_BYTES = 8 << 20
"""Bytes of one read or write of the bare limits."""
_TICKS = os.sysconf("SC_CLK_TCK")

Result = TypeVar("Result")


def in_turns(
    contestants: Mapping[str, Callable[[], Result]], repetitions: int = REPETITIONS
) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Call all contestants in turns, with a different one first each time; returns results, and errors by name.

    Drift of the machine affects all of them equally. One that raises is left out from then on.
    """
    names, results, problems = list(contestants), {name: [] for name in contestants}, {}  # type: ignore[var-annotated]
    for repetition in range(repetitions):
        for name in rotated(names, repetition):
            if name not in problems:
                try:
                    results[name].append(contestants[name]())
                except Exception as error:  # a peer may raise anything
                    problems[name] = problem(error)
    return {name: found for name, found in results.items() if name not in problems}, problems


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The names rotated, so that over the repetitions each is first, and last, as often as the others."""
    shift = by % max(1, len(names))
    return [*names[shift:], *names[:shift]]


def problem(error: BaseException) -> str:
    """One line for the list of peers that did not run."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of a few repetitions."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Quartiles of at least one value."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def seconds(call: Callable[[], object]) -> float:
    """By the clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass(slots=True)
class Usage:
    """Cost of a block; filled at its end."""

    wall_s: float = 0.0
    core_s: float = 0.0
    """Processor seconds, user and system, of this process, its children and those they left."""
    extra_bytes: int = 0
    """Peak of the proportional set sizes, less the sizes before; filled by `memory` alone."""


@contextmanager
def usage() -> Iterator[Usage]:
    """Seconds and processor seconds of a block, of this process and all processes under it."""
    found = Usage()
    before, began = core_seconds(), time.perf_counter()
    try:
        yield found
    finally:
        found.wall_s = time.perf_counter() - began
        found.core_s = core_seconds() - before


def core_seconds() -> float:
    """Processor time of this process, its ended children and its running descendants. Monotonic without orphans."""
    running = descendants()
    while True:
        own = os.times()
        of_running = sum(map(processor_seconds, running))
        found = descendants()
        if found == running:  # else one that ended may be missing in both sums
            return own.user + own.system + own.children_user + own.children_system + of_running
        running = found


def processor_seconds(process: int) -> float:
    """Processor time of a process and its ended children; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # ended meanwhile
    return sum(map(int, fields[11:15])) / _TICKS


def descendants(process: int | None = None) -> list[int]:
    """Processes below this one or another, at any depth; a saver too, though it has its own session."""
    found: list[int] = []
    ahead = [os.getpid() if process is None else process]
    while ahead:
        children = _children(ahead.pop())
        found += children
        ahead += children
    return found


def _children(process: int) -> list[int]:
    """Children of all its threads. When a thread ends, they move to another, which may have been read already."""
    tasks = Path(f"/proc/{process}/task")
    while tasks.exists():
        try:
            found = [(task / "children").read_text() for task in list(tasks.iterdir())]
            return sorted({int(child) for children in found for child in children.split()})
        except (FileNotFoundError, ProcessLookupError):
            continue
    return []


@contextmanager
def memory() -> Iterator[Usage]:
    """Peak extra memory of a block. Sampling takes processor time: do not time the same block.

    Another process looks, because in this one it would wait for the interpreter's lock.
    """
    found = Usage()
    command = [sys.executable, "-m", "bench.measuring", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        before = int(sampler.stdout.readline())
        try:
            yield found
        finally:
            sampler.stdin.close()
            found.extra_bytes = int(sampler.stdout.readline()) - before


def _sample(process: int) -> None:
    """Print the present size, and the peak when the input ends."""
    peak = memory_bytes(process)
    print(peak, flush=True)
    while not select.select([sys.stdin], [], [], SAMPLE_S)[0]:
        peak = max(peak, memory_bytes(process))
    print(max(peak, memory_bytes(process)))


def memory_bytes(process: int) -> int:
    """Proportional set sizes of a process and all its descendants except this one: shared memory counts once."""
    return sum(_memory_bytes(each) for each in [process, *descendants(process)] if each != os.getpid())


def _memory_bytes(process: int) -> int:
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0  # ended meanwhile
    return 1024 * sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


def memcpy_s(num_bytes: int, into: mmap.mmap, source: mmap.mmap) -> float:
    """Seconds of libc's memcpy between two touched buffers; see `touched`."""
    target, origin = (ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in (into, source))
    return seconds(lambda: ctypes.memmove(target, origin, num_bytes))


def touched(num_bytes: int) -> mmap.mmap:
    """Page-aligned memory that is really there, full of noise: no disk saves itself the writing of zeros."""
    buffer = mmap.mmap(-1, _whole_pages(num_bytes))
    noise = np.random.default_rng(0).bytes(IO_BYTES)
    for at in range(0, len(buffer), IO_BYTES):
        buffer[at : at + IO_BYTES] = noise[: len(buffer) - at]
    return buffer


def _whole_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def raw_write_s(path: Path, num_bytes: int, source: mmap.mmap, threads: int = 1) -> float:
    """Seconds to write this number of bytes durably: preallocated, past the page cache, fsync of file and folder."""
    with memoryview(source) as view, ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _direct(path.parent), 0o644)
        try:
            rounded = _whole_pages(num_bytes)
            os.posix_fallocate(file, 0, rounded)
            offsets = range(0, rounded, IO_BYTES)
            written = sum(pool.map(lambda at: os.pwrite(file, view[at : min(at + IO_BYTES, rounded)], at), offsets))
            if written != rounded:
                raise OSError(f"only {written} of {rounded} bytes were written to {path}")
            os.ftruncate(file, num_bytes)
            os.fsync(file)
        finally:
            os.close(file)
        sync_folder(path.parent)
        return time.perf_counter() - began


def raw_read_s(path: Path, into: mmap.mmap, threads: int = 1, *, cached: bool = False) -> float:
    """Seconds to read a file into touched memory, past the page cache unless `cached`."""
    size = path.stat().st_size
    with memoryview(into) as view, ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        file = os.open(path, os.O_RDONLY | (0 if cached else _direct(path.parent)))
        try:
            offsets = range(0, size, IO_BYTES)
            got = sum(pool.map(lambda at: os.preadv(file, [view[at : at + IO_BYTES]], at), offsets))
            if got != size:
                raise OSError(f"only {got} of {size} bytes were read from {path}")
        finally:
            os.close(file)
        return time.perf_counter() - began


def _direct(folder: Path) -> int:
    """O_DIRECT where the file system takes it."""
    probe = folder / ".direct"
    try:
        os.close(os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def sync_tree(folder: Path) -> None:
    """fsync all files and folders below, for peers that do not do it themselves."""
    for parent, _, names in os.walk(folder):
        for name in names:
            file = os.open(Path(parent, name), os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
        sync_folder(Path(parent))
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in it durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def tree_bytes(folder: Path) -> int:
    """Total size of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def forget_cached(folder: Path) -> None:
    """Have the page cache drop the files below; they must be durable."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def touch_free_memory(num_bytes: int) -> None:
    """Touch this many bytes. A virtual machine returns unused memory to its host, and the next user would pay."""
    touched(num_bytes).close()


def read_files(folder: Path) -> None:
    """Bring the files below into the page cache, in the same way for all: some libraries write past it."""
    forget_cached(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(IO_BYTES):
                    pass


@contextmanager
def meeting_place(world: int) -> Iterator[dict[str, str]]:
    """Environment for ranks that form a process group: they meet at a store of this process, as under torchrun."""
    # Imported here: the process that samples memory must not load torch.
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def output_of_ranks(module: str, world: int, arguments: Sequence[str], timeout_s: float) -> Any:
    """Run a module in so many ranks; what rank 0 prints last, from JSON. Raises RuntimeError if one fails."""
    with meeting_place(world) as place:
        command = [sys.executable, "-m", module, *arguments]
        environment = os.environ | place | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        try:
            outputs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(f"a rank of {module} failed; see above")
    return json.loads(outputs[0].splitlines()[-1])


if __name__ == "__main__":
    _sample(int(sys.argv[1]))
