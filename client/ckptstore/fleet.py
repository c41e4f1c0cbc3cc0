"""Work units: what a command does to many checkpoints, cut for several processes or hosts.

They run on engines that exist: processes of this host, Dask, Ray. Their results are objects in the store.

Every engine is a `concurrent.futures.Executor`. Repeating a unit does no harm, so a killed worker costs one unit.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from typing import Any, Literal, NamedTuple
from zlib import crc32

from ckptstore.errors import CorruptObject, InvalidRequest, ObjectMissing
from ckptstore.format.documents import JSON, StoredDocument, digest
from ckptstore.format.parsing import parse_sealed, seal
from ckptstore.stores import Store
from ckptstore.threads import in_parallel
from ckptstore.values import Value

_LOG = logging.getLogger(__name__)
_COUNTS_S = 24 * 3600.0
MOST_TARGETS = 16
MOST_BYTES = 16 << 30
"""A unit ends before a checkpoint that exceeds this. A single checkpoint is never cut."""


class Unit(NamedTuple):
    """Targets that one worker takes at a time."""

    targets: tuple[str, ...]
    """Ids of checkpoints of one run, so that the chunks that they share are read once; or the name of one run."""
    bytes: int
    """0 if that is not known."""


def units_of(singles: Iterable[Unit]) -> Iterator[Unit]:
    """Units of a single target, joined: as many of one run as fit, in the given order."""
    joined: dict[str, Unit] = {}
    for single in singles:
        run = single.targets[0].partition("@")[0]
        unit = joined.get(run, Unit((), 0))
        if unit.targets and (len(unit.targets) == MOST_TARGETS or unit.bytes + single.bytes > MOST_BYTES):
            yield unit
            unit = Unit((), 0)
        joined[run] = Unit(unit.targets + single.targets, unit.bytes + single.bytes)
    yield from joined.values()


class Part(NamedTuple):
    """One of several equal parts of the targets of a command, counted from 1."""

    number: int
    of: int

    @staticmethod
    def parse(text: str, environment: Mapping[str, str]) -> Part:
        """The part that `3/8` names; `auto`: the one of this task of a Slurm array or of a Kubernetes Indexed Job.

        Raises InvalidRequest, also in the last task of an array whose ids have gaps.
        """
        try:
            if text != "auto":
                number, of = map(int, text.split("/"))
            elif "JOB_COMPLETION_INDEX" in environment:
                number, of = int(environment["JOB_COMPLETION_INDEX"]) + 1, int(environment["JOB_COMPLETIONS"])
            else:
                task, first, of = (int(environment[f"SLURM_ARRAY_TASK_{name}"]) for name in ("ID", "MIN", "COUNT"))
                number = task - first + 1
        except (KeyError, ValueError):
            number = of = 0
        if not 1 <= number <= of:
            raise InvalidRequest(
                f"--part {text} names no part here",
                "Use 1/8 to 8/8; auto in a Slurm array (--array=1-8) or an Indexed Job that sets JOB_COMPLETIONS",
            )
        return Part(number, of)

    def has(self, target: str) -> bool:
        """Whether a target belongs to this part.

        Depends on its name alone: parts that list a store at different times leave nothing out.
        """
        return crc32(target.encode()) % self.of == self.number - 1


@contextmanager
def open_engine(where: str) -> Iterator[tuple[Executor, int]]:
    """The engine local:N, dask://HOST:PORT or ray://HOST:PORT, and how many units it works on at a time.

    Its workers need this package, and the store with credentials. Raises InvalidRequest, also if nothing responds.
    """
    kind, _, rest = where.partition(":")
    with ExitStack() as stack:
        executor: Executor
        try:
            if kind == "dask":
                from distributed import Client

                client: Any = stack.enter_context(Client(f"tcp:{rest}"))  # type: ignore[no-untyped-call]
                executor, slots = client.get_executor(), sum(client.nthreads().values())
            elif kind == "ray":
                import ray

                stack.enter_context(ray.init(where))
                # Ray takes functions alone, and no partial ones; this one is sent once.
                task = ray.remote(lambda call, *args: call(*args))
                executor, slots = _RayTasks(task), int(ray.cluster_resources()["CPU"])
            else:
                slots = int(rest) if kind == "local" else 0
                executor = _Processes(slots)
        except (ImportError, OSError, ValueError) as error:
            raise InvalidRequest(
                f"cannot work on {where}: {error}",
                "Use local:8; dask://HOST:8786 with ckptd[dask]; ray://HOST:10001 with ckptd[ray]",
            ) from error
        stack.callback(executor.shutdown)
        yield executor, slots


class _Processes(ThreadPoolExecutor):
    """Processes of this host, each below a thread of its own: a killed one takes no other along."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As the executor's; a call whose process is killed is made once more."""
        return super().submit(_in_own_process, fn, *args, **kwargs)


_own = threading.local()


def _in_own_process(call: Any, *args: Any) -> Any:
    for _ in range(2):
        if not hasattr(_own, "pool"):
            # A fork could copy a lock that a thread holds.
            _own.pool = ProcessPoolExecutor(1, get_context("spawn"), _end_with_caller)
        try:
            return _own.pool.submit(call, *args).result()
        except BrokenProcessPool as error:
            del _own.pool
            killed = error
    raise killed


def _end_with_caller() -> None:
    """The pipe of a pool's worker does not end when the caller is killed: the worker has both ends of it."""
    caller = parent_process()

    def wait() -> None:
        if caller is not None:
            caller.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@dataclass
class _RayTasks(Executor):
    """Tasks of Ray, which repeats the tasks of a killed worker."""

    task: Any
    """Calls its first argument with all others."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        """As an executor's."""
        return self.task.remote(fn, *args, **kwargs).future()


def run_units(executor: Executor, work: Callable[[Unit], Any], units: Iterable[Unit]) -> Iterator[tuple[Unit, Any]]:
    """Each unit with the result of `work`, or with the exception that ended it, as they end.

    work: must be picklable. If the caller stops, units that have not begun are dropped.
    """
    futures = {executor.submit(work, unit): unit for unit in units}
    try:
        for future in as_completed(futures):
            # Dask computes a result again if its worker dies before the future is released.
            error = future.exception()
            # Ray's errors have the task's as their cause.
            yield futures.pop(future), getattr(error, "cause", error) or future.result()
    finally:
        for future in futures:
            future.cancel()


class UnitResult(StoredDocument):
    """The result of a command for one unit."""

    kind: Literal["unit"]
    targets: tuple[str, ...]
    body: JSON = None
    """Its output as JSON; None: the targets were deleted in the meantime."""
    ids: tuple[str, ...] = ()
    problem: str = ""
    """Why checkpoints are damaged."""


class UnitResults(Value):
    """The results of one job in the store, by which a retry skips what is done. They count for a day."""

    store: Store
    folder: str
    """The same for the same command; ends in a slash."""

    def write(self, result: UnitResult) -> None:
        """Durable on return."""
        self.store.put(f"{self.folder}{digest(repr(result.targets).encode())}.json", seal(result))

    def read(self, now: float) -> list[UnitResult]:
        """In the order of their targets; each target once, as a worker may outlive a killed call.

        Units whose result is damaged count as not done, with a warning. Raises UnsupportedFormat.
        """
        keys = [info.key for info in self.store.list(self.folder) if now - info.modified_at < _COUNTS_S]
        results, seen = list[UnitResult](), set[str]()
        for result in sorted(filter(None, in_parallel(self._read, keys)), key=lambda result: result.targets):
            if not seen.issuperset(result.targets):
                results.append(result)
                seen.update(result.targets)
        return results

    def _read(self, key: str) -> UnitResult | None:
        try:
            return parse_sealed(self.store.get(key), UnitResult, self.store.object_url(key))
        except (CorruptObject, ObjectMissing) as error:  # missing: another part ended, and removed all results
            _LOG.warning("a work unit counts as not done: %s", error)
            return None

    def forget(self) -> None:
        """Remove all: the next call of the command is another job."""
        self.store.delete_many([info.key for info in self.store.list(self.folder)])
