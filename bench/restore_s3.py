"""Time until a state on S3 is restored into the live tensors, against bare ranged reads of the stored bytes.

The limit is obstore, a client in Rust, which reads our shard into touched memory, with the fastest range size and
number of concurrent requests. Every bit is compared after every restore.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bench.bucket import (
    COLUMNS,
    CONCURRENCIES,
    Service,
    Timed,
    check_restored,
    fastest,
    goal,
    key_of,
    median_s,
    row,
    running_bucket,
    shard_of,
)
from bench.measuring import in_turns, problem, touched
from bench.peers.s3 import RawObstore, open_s3_peers
from bench.report import Report
from bench.state import State, trained, wanted_bytes
from ckpt import Checkpointer

GOAL = 0.9
PROBED_BYTES = 256 << 20
RANGES = [(concurrency, size) for concurrency in CONCURRENCIES for size in (16 << 20, 32 << 20, 64 << 20)]
"""Concurrent requests, and bytes of each."""
PEERS = ("s3torchconnector", "s3torchconnector, DCP", "torch over s3fs", "runai-model-streamer")
OURS = {"ckptd, off": "off", "ckptd, fast": "fast"}
"""Their names, and `compress`."""
RAW = {name: f"raw GET of {name}" for name in OURS}
FOLDER = "saved"

Load = Callable[[], object]


def measure(quick: bool) -> Report:
    """SeaweedFS on this machine takes as much of its processor as its clients do."""
    state = trained("fp32", wanted_bytes(quick))
    with ExitStack() as stack:
        service = stack.enter_context(running_bucket())
        ours, shards = saved_by_us(service, state, stack)
        theirs, missing = saved_by_peers(service, state)
        raw = RawObstore(service.bucket)
        memory = memoryview(touched(max(size for _, size in shards.values())))
        probed = min(PROBED_BYTES, min(size for _, size in shards.values()))
        key = shards["ckptd, off"][0]
        concurrency, size = ranges = fastest(lambda way: raw.get(key, memory[:probed], *way), RANGES, service)
        loads: dict[str, Load] = {}
        for name, (key, stored) in shards.items():
            loads[RAW[name]] = lambda key=key, stored=stored: raw.get(key, memory[:stored], *ranges)  # type: ignore[misc]
        contestants = {name: timed(service, load) for name, load in loads.items()}
        contestants |= {name: checked(service, state, load) for name, load in (ours | theirs).items()}
        found, problems = in_turns(contestants)
    sizes = {RAW[name]: size for name, (_, size) in shards.items()}
    return Report(
        bench="restore-s3",
        what=f"{state.num_bytes / 1e9:.2f} GB from SeaweedFS on the same cores; raw: obstore, {concurrency} ranges "
        f"of {size >> 20} MiB at a time; MB/s and core-s/GB of the state, or of the stored bytes",
        columns=COLUMNS,
        rows=[row(name, times, sizes.get(name, state.num_bytes)) for name, times in found.items()],
        goals=[goal("raw GET of the stored bytes", name, found[RAW[name]], found[name], GOAL) for name in OURS],
        limit=median_s(found[RAW["ckptd, off"]]),
        peers={name: median_s(times) for name, times in found.items() if name in theirs},
        problems=missing | problems,
        state_bytes=state.num_bytes,
        facts={"seconds": median_s(found["ckptd, off"])},
    )


def timed(service: Service, load: Load) -> Callable[[], Timed]:
    """A call that measures a load."""
    return lambda: service.timed(load)


def checked(service: Service, state: State, load: Load) -> Callable[[], Timed]:
    """The same call, then a comparison of every bit."""
    return lambda: check_restored(state, timed(service, load))


def saved_by_us(
    service: Service, state: State, stack: ExitStack, folder: str = FOLDER
) -> tuple[dict[str, Load], dict[str, tuple[str, int]]]:
    """Our loads, by name; with key and size of each shard."""
    loads: dict[str, Load] = {}
    shards: dict[str, tuple[str, int]] = {}
    for name, compress in OURS.items():
        options: Any = {"run": compress, "compress": compress, "options": service.options, "slots": 1}
        with Checkpointer(service.url(folder), **options) as saver:
            checkpoint = saver.save(state.model, state.optim, 1)
        checkpointer = stack.enter_context(Checkpointer(service.url(folder), **options))
        loads[name] = lambda checkpointer=checkpointer: checkpointer.restore(state.model, state.optim)  # type: ignore[misc]
        shards[name] = f"{folder}/{shard_of(checkpoint)}", checkpoint.stored_bytes
    return loads, shards


def saved_by_peers(service: Service, state: State) -> tuple[dict[str, Load], dict[str, str]]:
    """The loads of the peers, by name; and the errors of the other peers."""
    peers, problems = open_s3_peers(PEERS, service.bucket)
    loads: dict[str, Load] = {}
    for name, peer in peers.items():
        key = key_of(name)
        try:
            peer.save(state, key)
        except Exception as error:  # a peer may raise anything
            problems[name] = problem(error)
            continue
        loads[name] = lambda peer=peer, key=key: peer.load(key, state)  # type: ignore[misc]
    return loads, problems
