"""Time until a state is committed on S3, against bare uploads of the stored bytes.

The limit is obstore, a client in Rust, which uploads our shard from memory, in parts, with the fastest number of
concurrent requests: the raw shard next to our saves without codec, and the float-split shard next to saves that
encode. The peers' objects are durable when their uploads are completed, as ours are.
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
    read_shard,
    row,
    running_bucket,
)
from bench.measuring import in_turns
from bench.peers.s3 import RawObstore, open_s3_peers
from bench.report import Report
from bench.state import State, trained, wanted_bytes
from ckpt import Checkpointer
from ckptstore.commits.catalog import Checkpoint

GOAL = 0.9
PROBED_BYTES = 100_000_000
PEERS = ("s3torchconnector", "s3torchconnector, DCP", "torch over s3fs")
OURS = {"ckptd, off": "off", "ckptd, fast": "fast"}
"""Their names, and `compress`."""
RAW = {name: f"raw PUT of {name}" for name in OURS}
FOLDER = "saved"

Save = Callable[[], object]
"""Into FOLDER; durable on return."""


def measure(quick: bool) -> Report:
    """SeaweedFS on this machine takes several times the processor time of its clients."""
    state = trained("fp32", wanted_bytes(quick))
    with ExitStack() as stack:
        service = stack.enter_context(running_bucket())
        ours = {name: saver(service, state, compress, stack) for name, compress in OURS.items()}
        shards = {name: stored_bytes(service, state, save) for name, save in ours.items()}
        raw = RawObstore(service.bucket)
        probed = shards["ckptd, off"][:PROBED_BYTES]
        concurrency = fastest(lambda at: raw.put(f"{FOLDER}/x", probed, at), CONCURRENCIES, service)
        peers, missing = open_s3_peers(PEERS, service.bucket)
        savers: dict[str, Save] = {}
        for name, shard in shards.items():
            savers[RAW[name]] = lambda shard=shard: raw.put(f"{FOLDER}/x", shard, concurrency)  # type: ignore[misc]
        savers |= ours
        for name, peer in peers.items():
            savers[name] = lambda peer=peer, name=name: peer.save(state, f"{FOLDER}/{key_of(name)}")  # type: ignore[misc]
        found, problems = in_turns({name: measured(service, save) for name, save in savers.items()})
    sizes = {name: len(shard) for name, shard in shards.items()}
    sent = sizes | {RAW[name]: size for name, size in sizes.items()}
    return Report(
        bench="durable-s3",
        what=f"{state.num_bytes / 1e9:.2f} GB to SeaweedFS on the same cores, {sizes['ckptd, fast'] / 1e9:.2f} GB with "
        f"float-split; raw: obstore, {concurrency} parts at a time; MB/s and core-s/GB of the bytes that each sends",
        columns=COLUMNS,
        rows=[row(name, timed, sent.get(name, state.num_bytes)) for name, timed in found.items()],
        goals=[goal("raw PUT of the stored bytes", name, found[RAW[name]], found[name], GOAL) for name in OURS],
        limit=median_s(found[RAW["ckptd, off"]]),
        peers={name: median_s(timed) for name, timed in found.items() if name in peers},
        problems=missing | problems,
        state_bytes=state.num_bytes,
        facts={"seconds": median_s(found["ckptd, off"]), "stored_bytes": sizes["ckptd, fast"]},
    )


def measured(service: Service, save: Save) -> Callable[[], Timed]:
    """A call that measures a save and then deletes it."""

    def call() -> Timed:
        try:
            return service.timed(save)
        finally:
            service.clear(FOLDER)

    return call


def saver(service: Service, state: State, compress: str, stack: ExitStack) -> Save:
    """Our savers. Process and memory exist from the first save on."""
    # Unchanged chunks would not be stored again.
    options: Any = {"run": compress, "compress": compress, "options": service.options, "slots": 1, "max_references": 0}
    checkpointer = stack.enter_context(Checkpointer(service.url(FOLDER), **options))
    steps = iter(range(1, 1000))
    return lambda: checkpointer.save_async(state.model, state.optim, next(steps)).result()


def stored_bytes(service: Service, state: State, save: Save) -> memoryview:
    """Our shard, after a restore from it was compared bit by bit."""
    checkpoint = save()
    assert isinstance(checkpoint, Checkpoint)
    with Checkpointer(service.url(FOLDER), run=checkpoint.run, options=service.options) as checkpointer:
        check_restored(state, lambda: checkpointer.restore(state.model, state.optim))
    shard = read_shard(service.store(FOLDER), checkpoint)
    service.clear(FOLDER)
    return shard
