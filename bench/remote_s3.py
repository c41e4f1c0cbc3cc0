"""Saves to S3 and restores from it over a network: a round trip of 20 ms, and less bandwidth than the service has.

A proxy in a process of its own stands for the network, so that neither the cores of SeaweedFS nor ours are the limit.
The limit is obstore, which sends and receives the stored bytes with the fastest number of requests in flight.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from bench.bucket import check_restored, running_bucket
from bench.durable_s3 import FOLDER, OURS, saver, stored_bytes
from bench.measuring import Spread, in_turns, seconds, touched
from bench.peers.s3 import PART_BYTES
from bench.report import Goal, Report
from bench.restore_s3 import saved_by_us
from bench.slow_store import running_proxy
from bench.state import State, trained, wanted_bytes
from ckptstore.stores import multipart

GOAL = 0.9
ROUND_TRIP_S = 0.02
BYTES_PER_S = 100e6
CONCURRENCIES = (4, 8, 16)
PROBED_BYTES = 8 * PART_BYTES
VERBS = {"PUT": "save", "GET": "restore"}
KEPT = "kept"
"""Folder of what is restored."""
OUR_UPLOADS, OUR_READS = multipart.BUFFERED_BYTES // multipart.PART_BYTES - 1, multipart.MultipartStore.parallel_reads


@dataclass(frozen=True, slots=True)
class Contestant:
    """One transfer of a shard."""

    call: Callable[[], float]
    """Returns its seconds."""
    num_bytes: int
    in_flight: int
    """Requests at a time, at most."""


def measure(quick: bool) -> Report:
    """Uploads are deleted past the proxy, and not timed."""
    state = trained("fp32", wanted_bytes(quick))
    with ExitStack() as stack:
        local = stack.enter_context(running_bucket())
        endpoint = stack.enter_context(network(local.s3.endpoint))
        contestants = contestants_over(local, replace(local, s3=replace(local.s3, endpoint=endpoint)), state, stack)
        found, problems = in_turns({name: one.call for name, one in contestants.items()})
    return report("remote-s3", state, contestants, found, problems)


def report(
    bench: str,
    state: State,
    contestants: Mapping[str, Contestant],
    found: Mapping[str, Sequence[float]],
    problems: Mapping[str, str],
) -> Report:
    """The table, and each of ours against the bare transfer of its bytes, whose name is that of ours with "raw"."""
    medians = {name: Spread.of(times).median for name, times in found.items()}
    rows = []
    for name, times in found.items():
        one = contestants[name]
        rows.append((name, str(Spread.of(times)), f"{one.num_bytes / medians[name] / 1e6:.0f}", f"{one.in_flight}"))
    ours = [name for name in contestants if name.endswith(tuple(VERBS.values()))]
    return Report(
        bench=bench,
        what=f"{state.num_bytes / 1e9:.2f} GB, {ROUND_TRIP_S * 1e3:.0f} ms, {BYTES_PER_S / 1e6:.0f} MB/s; MB/s of the "
        "stored bytes; raw: obstore",
        columns=("", "seconds", "MB/s", "requests in flight"),
        rows=rows,
        goals=[
            Goal(raw, name, medians[raw] / medians[name] if name in medians else float("nan"), GOAL, "at least")
            for name in ours
            if (raw := _raw(name)) in medians
        ],
        problems=problems,
        state_bytes=state.num_bytes,
        facts=medians | {f"requests in flight, {name}": one.in_flight for name, one in contestants.items()},
    )


def _raw(name: str) -> str:
    """The bare transfer of "SERVICE: NAME, VERB"; the service may be absent."""
    what, _, verb = name.rpartition(", ")
    service, colon, what = what.rpartition(": ")
    (bare,) = (method for method, known in VERBS.items() if known == verb)
    return f"{service}{colon}raw {bare} of {what}"


def contestants_over(
    local: Any, remote: Any, state: State, stack: ExitStack, ours: Iterable[str] = tuple(OURS)
) -> dict[str, Contestant]:
    """By name. local, remote: the same service, as a bench.bucket.Service, without and with the network before it."""
    savers = {name: saver(remote, state, OURS[name], stack) for name in ours}
    shards = {name: stored_bytes(local, state, save) for name, save in savers.items()}
    loads, kept = saved_by_us(remote, state, stack, KEPT)
    raw, memory = remote.raw, memoryview(touched(max(map(len, shards.values()))))
    probe, key = shards["ckptd, off"][:PROBED_BYTES], kept["ckptd, off"][0]
    puts = fastest(lambda at: raw.put("probe", probe, at))
    gets = fastest(lambda at: raw.get(key, memory[:PROBED_BYTES], at))
    found = {}
    for name, shard in shards.items():
        size = len(shard)

        def put(shard: memoryview = shard) -> None:
            raw.put(f"{FOLDER}/x", shard, puts)

        def get(of: tuple[str, int] = kept[name]) -> None:
            raw.get(of[0], memory[: of[1]], gets)

        def load(call: Callable[[], object] = loads[name]) -> float:
            return check_restored(state, lambda: seconds(call))

        found[f"raw PUT of {name}"] = Contestant(cleared(local, put), size, puts)
        found[f"{name}, save"] = Contestant(cleared(local, savers[name]), size, OUR_UPLOADS)
        found[f"raw GET of {name}"] = Contestant(lambda get=get: seconds(get), size, gets)  # type: ignore[misc]
        found[f"{name}, restore"] = Contestant(load, size, OUR_READS)
    return found


def fastest(transfer: Callable[[int], object]) -> int:
    """The fastest number of requests in flight; each is measured twice, in turns."""
    spent = [(seconds(lambda at=at: transfer(at)), at) for _ in range(2) for at in CONCURRENCIES]  # type: ignore[misc]
    return min(spent)[1]


def cleared(local: Any, save: Callable[[], object]) -> Callable[[], float]:
    """A call that times a save, and then deletes it."""

    def call() -> float:
        try:
            return seconds(save)
        finally:
            local.clear(FOLDER)

    return call


@contextmanager
def network(endpoint: str) -> Iterator[str]:
    """An endpoint before this one, behind the proxy. Its process ends on exit."""
    ours, theirs = multiprocessing.Pipe()
    where = urlsplit(endpoint)
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, where.hostname, where.port), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.send(None)
        process.join()


def _serve(control: Connection, host: str, port: int) -> None:
    with running_proxy(host, port, ROUND_TRIP_S, BYTES_PER_S) as proxy:
        control.send(proxy.port)
        control.recv()
