"""Checkpoints written without torch, for tests of everything below the training library."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ckptstore import names
from ckptstore.clock import Clock, system_clock
from ckptstore.codecs.chunk_codecs import CodingPolicy, fast
from ckptstore.codecs.delta import DELTA
from ckptstore.commits.catalog import Checkpoint, from_outcome, list_checkpoints
from ckptstore.commits.commit import EARLIER, commit_attempt, read_outcome, read_receipt
from ckptstore.errors import NoCheckpoint, StoreUnavailable, SweepBegun
from ckptstore.format.boxes import Want
from ckptstore.format.columns import column
from ckptstore.format.documents import BASES, FORMAT, JSON, OPTIMIZER, Chunks, Content, Receipt, References, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import seal
from ckptstore.format.planning import ChunkRead, entry_bytes, plan_all, plan_reads
from ckptstore.format.records import Policy
from ckptstore.format.shards import (
    ChunkSpan,
    EncodedChunk,
    Placed,
    Places,
    Slice,
    StoredChunk,
    base_table,
    chunk_table,
    delta_of,
    encode_chunk,
    place_slices,
    plan_chunks,
    raw_bytes,
    slice_tables,
)
from ckptstore.format.statistics import Statistics, Table, named_document, side_extension
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import Source, StoreSource, read_manifest
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import SWEEP_GRACE_S, collect, undelete
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.support.stores import Faults, FaultyStore, Interleaving, Mode, MovableClock
from tests.support.waiting import present

Arrays = Mapping[str, npt.NDArray[Any]]
_S = TypeVar("_S")
_R = TypeVar("_R")
_O = TypeVar("_O")


def flipped(data: bytes, at: int, mask: int = 1) -> bytes:
    """The bytes, one of which has other bits: those of `mask`."""
    damaged = bytearray(data)
    damaged[at] ^= mask
    return bytes(damaged)


def flip(path: Path, at: int | None = None, mask: int = 1) -> None:
    """Damage one byte of a file, by default the one in the middle."""
    data = path.read_bytes()
    path.write_bytes(flipped(data, len(data) // 2 if at is None else at, mask))


def sample_arrays(seed: int = 0) -> dict[str, npt.NDArray[Any]]:
    """A little of everything: several chunks, several codecs, an empty and a zero-dimensional array."""
    return dict(_sampled(seed))


@functools.lru_cache(maxsize=32)
def _sampled(seed: int) -> dict[str, npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    sampled: dict[str, npt.NDArray[Any]] = {
        "model/weight": (rng.standard_normal((700, 1024)) * 0.02).astype(np.float32),
        "model/half": (rng.standard_normal((64, 33)) * 0.02).astype(np.float16),
        "model/ids": rng.integers(0, 50, (1000,), dtype=np.int64),
        "model/empty": np.zeros((0, 3), dtype=np.float32),
        "model/scalar": np.array(seed, dtype=np.int32),
    }
    for array in sampled.values():
        array.setflags(write=False)
    return sampled


def write_rank(
    store: Store,
    run: str,
    attempt: Attempt,
    arrays: Arrays,
    rank: int = 0,
    world_size: int = 1,
    metrics: Mapping[str, float] | None = None,
    clock: Clock = system_clock,
    coding: CodingPolicy = fast,
    base: Attempt | None = None,
    statistics: bool | Literal["apart"] = False,
    earlier: Sequence[Attempt] = (),
    deltas: bool = False,
) -> StoredReceipt:
    """What one rank's saver writes: its shard (if it has arrays; those of `optim/` in a second one), then its receipt.

    base: chunks that this attempt has, or references itself, are referenced. statistics: those of no elements; "apart":
    in an object of their own although there is a shard, as they were once. deltas: of chunks of `base` that differ.
    """
    arrays, optimizer = _by_shard(arrays)
    placed = place_slices(Slice.whole(name, str(a.dtype), a.shape) for name, a in arrays.items())
    raw = bytearray(raw_bytes(placed))
    for place in placed:
        raw[place.at : place.at + place.slice.bytes] = np.ascontiguousarray(arrays[place.slice.entry]).tobytes()
    spans = plan_chunks(placed)
    chunks = [encode_chunk(span.of(memoryview(raw)), coding(span.dtype), hashes_raw=deltas) for span in spans]
    shards, extensions = [], dict[str, JSON]()
    bases = dict[int, list[StoredChunk]]()
    if deltas and base is not None:
        earlier_raw = memoryview(b"".join(_entries(store, run, base)[place.slice.entry] for place in placed))
        chunks, bases = _deltas(spans, memoryview(raw), earlier_raw, chunks, _stored(store, run, base, rank))
        extensions = {BASES: True} if bases else {}
    if placed:
        references = _referenced(store, run, base, rank, chunks) if base is not None else None
        there = set(references.chunk.tolist()) if references is not None else set()
        own = [chunk.data for number, chunk in enumerate(chunks) if number not in there]
        offset = sum(map(len, own)) if own and statistics != "apart" else None
        tail, sides = _statistics(attempt, rank, len(placed), offset) if statistics else (b"", {})
        extensions = {**extensions, **sides}
        if own:
            with store.open_writer(RunKeys(run).shard(attempt, names.shard_name(rank)), len(raw)) as writer:
                for data in own if offset is None else (*own, tail):
                    writer.write(data)
        if tail and offset is None:
            store.put(RunKeys(run).statistics(attempt, rank), tail)
        shards = [Shard(names.shard_name(rank), rank, _table(chunks, bases), references, base_table(bases))]
    if second := place_slices(Slice.whole(name, str(a.dtype), a.shape) for name, a in optimizer.items()):
        shards.append(_optimizer_shard(store, run, attempt, rank, second, optimizer, base))
        extensions = {**extensions, OPTIMIZER: True}
    entries, slices = slice_tables(placed, (), second)
    receipt = Receipt(
        format=FORMAT, kind="receipt", run=run, step=attempt.step, attempt=str(attempt), rank=rank,
        world_size=world_size, created_at=clock(), local={"epoch": rank}, metrics=dict(metrics or {}),
        content=Content(shards=shards, entries=entries, slices=slices, aliases={}, trees=_trees(arrays)),
        extensions={**extensions, EARLIER: list(map(str, earlier))} if earlier else extensions,
    )  # fmt: skip
    data = seal(receipt)
    store.put(RunKeys(run).receipt(attempt, rank), data)
    return StoredReceipt.of(receipt, data)


def _by_shard(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """The arrays of the first shard, and of the second: of a rank with optimizer state alone, the first has it."""
    first = {name: array for name, array in arrays.items() if not names.of_optimizer(name)} or arrays
    return first, {name: array for name, array in arrays.items() if name not in first}


def _optimizer_shard(
    store: Store, run: str, attempt: Attempt, rank: int, placed: Sequence[Placed], arrays: Arrays, base: Attempt | None
) -> Shard:
    raw = b"".join(np.ascontiguousarray(arrays[place.slice.entry]).tobytes() for place in placed)
    name = names.shard_name(rank, optimizer=True)
    chunks = [encode_chunk(span.of(memoryview(raw)), fast(span.dtype)) for span in plan_chunks(placed)]
    references = _referenced(store, run, base, rank, chunks, 1) if base is not None else None
    there = set(references.chunk.tolist()) if references is not None else set()
    with store.open_writer(RunKeys(run).shard(attempt, name), len(raw)) as writer:
        for number, chunk in enumerate(chunks):
            if number not in there:
                writer.write(chunk.data)
    return Shard(name, rank, chunk_table(chunks), references)


def _trees(arrays: Arrays) -> dict[str, JSON]:
    """The trees of the model and of the assets, if there are arrays of them."""
    tree = {name.removeprefix("model/"): {"$": "tensor", "name": name} for name in arrays}
    trees: dict[str, JSON] = {"model": tree} if arrays else {}
    if assets := {n.removeprefix("assets/"): {"$": "array", "name": n} for n in arrays if n.startswith("assets/")}:
        trees["assets"] = assets
    return trees


def _statistics(attempt: Attempt, rank: int, rows: int, offset: int | None) -> tuple[bytes, dict[str, JSON]]:
    """The document of so many slices, and what a receipt says about it."""
    table = Table.of([(0,) * 6] * rows)
    data = seal(Statistics.of(attempt, rank, table))
    side = named_document(data, table, [""] * rows)
    return data, side_extension(rank, msgspec.structs.replace(side, offset=offset))


def _deltas(
    spans: Sequence[ChunkSpan], raw: memoryview, earlier: memoryview, chunks: list[EncodedChunk],
    stored: Sequence[list[StoredChunk]],
) -> tuple[list[EncodedChunk], dict[int, list[StoredChunk]]]:  # fmt: skip
    """The chunks as deltas of an earlier checkpoint's chunks, and what these need. stored: see `_stored`."""
    found, bases = [], dict[int, list[StoredChunk]]()
    for number, (span, whole, known) in enumerate(zip(spans, chunks, stored, strict=True)):
        same = span.of(earlier) == span.of(raw)
        chunk = delta_of(span.of(raw), span.of(earlier), span, whole)
        chunk = msgspec.structs.replace(known[-1].chunk, raw_digest=whole.raw_digest) if same else chunk
        if chunk.codec == DELTA:
            bases[number] = known[:-1] if same else known
        found.append(chunk)
    return found, bases


def _table(chunks: Sequence[EncodedChunk], bases: Mapping[int, Sequence[StoredChunk]]) -> Chunks:
    table = chunk_table(chunks)
    known = bytes.fromhex("".join(chunk.raw_digest for chunk in chunks))
    return msgspec.structs.replace(table, raw_digest=known if bases else None)


def _entries(store: Store, run: str, attempt: Attempt) -> dict[str, bytes]:
    return read_all(StoreSource(store), present(from_outcome(present(read_outcome(Run(store, run), attempt)))))


def _stored(store: Store, run: str, attempt: Attempt, rank: int) -> list[list[StoredChunk]]:
    """For each chunk of a rank, what is decoded to read it, in order."""
    planned = plan_all(read_receipt(Run(store, run), attempt, rank).content)
    reads = sorted((r for r in planned if r.shard == names.shard_name(rank)), key=lambda read: read.index)

    def part(read: ChunkRead) -> StoredChunk:
        chunk = EncodedChunk(b"", read.raw, read.stored, read.codec, read.digest)
        return StoredChunk(read.attempt or str(attempt), read.offset, chunk)

    return [[*map(part, read.parts)] for read in reads]


def _referenced(
    store: Store, run: str, base: Attempt, rank: int, chunks: Sequence[EncodedChunk], number: int = 0
) -> References | None:
    shard = read_receipt(Run(store, run), base, rank).content.shards[number]
    places = Places.of(shard)
    holders = [str(base), *(shard.references.attempts if shard.references is not None else ())]
    lies = {shard.chunks.digest_of(number): places.order(number) for number in range(len(shard.chunks.raw))}
    found = [(number, *lies[chunk.digest]) for number, chunk in enumerate(chunks) if chunk.digest in lies]
    attempts = sorted({holders[holder] for _, holder, _ in found})
    if not found:
        return None
    return References(
        attempts=attempts,
        chunk=column(number for number, _, _ in found),
        attempt=column(attempts.index(holders[holder]) for _, holder, _ in found),
        offset=column(offset for _, _, offset in found),
    )


def write_checkpoint(
    store: Store,
    run: str = "gpt",
    step: int = 0,
    arrays: Arrays | None = None,
    metrics: Mapping[str, float] | None = None,
    clock: Clock = system_clock,
    coding: CodingPolicy = fast,
    base: Attempt | None = None,
    generation: int = 0,
    statistics: bool | Literal["apart"] = False,
    deltas: bool = False,
) -> Checkpoint:
    """A committed checkpoint of a single process. base, statistics, deltas: see `write_rank`."""
    attempt = Attempt(step, new_ulid(clock()), generation=generation)
    arrays = sample_arrays(step) if arrays is None else arrays
    receipt = write_rank(
        store, run, attempt, arrays, metrics=metrics, clock=clock, coding=coding, base=base, statistics=statistics,
        deltas=deltas,
    )  # fmt: skip
    return present(from_outcome(commit_attempt(Run(store, run, clock), [receipt])))


def whole_entries(names: Iterable[str]) -> list[Want]:
    """Requests for whole entries, each into a buffer of its name."""
    return [Want(name, None, name) for name in names]


def read_all(
    source: Source, checkpoint: Checkpoint, threads: int = 4, progress: Callable[[int], None] = lambda _: None
) -> dict[str, bytes]:
    """The bytes of each entry."""
    content = read_manifest(source, checkpoint).content
    buffers = {name: bytearray(size) for name, size in entry_bytes(content).items()}
    into = {name: memoryview(buffer) for name, buffer in buffers.items()}
    fetch(source, checkpoint, plan_reads(content, whole_entries(buffers)), into, progress=progress, threads=threads)
    return {name: bytes(buffer) for name, buffer in buffers.items()}


RUN = "gpt"
SMALL = {"model/a": np.arange(3000, dtype=np.float32)}


def write(store: Store, *steps: int) -> list[Checkpoint]:
    return [write_checkpoint(store, RUN, step, SMALL) for step in steps]


def steps(store: Store, run: str = RUN) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(Run(store, run))]


def prune(store: Store, keep: int) -> list[Checkpoint]:
    """Prune to the newest; returns those spared."""
    run = Run(store, RUN)
    return apply_prune(run, plan_prune(run, Policy(keep)))


def prune_undelete_and_collect(store: Store, taken_back: Attempt) -> None:
    """All that deletes, a grace after the first prunes: keep the newest, take one back, sweep the rest."""
    later = MovableClock(SWEEP_GRACE_S + 60)
    run = Run(store, RUN, later)
    apply_prune(run, plan_prune(run, Policy(1)), grace_s=3600)
    with contextlib.suppress(SweepBegun, NoCheckpoint):
        undelete(Run(store, RUN, by="me"), taken_back)
    collect(run)


def keys(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def intact(store: Store, checkpoint: Checkpoint) -> bool:
    """Whether every byte of it is there."""
    return verify(StoreSource(store), checkpoint, threads=1).ok


def clear(store: Store) -> None:
    store.delete_many(keys(store))


def count_calls(store: Store, action: Callable[[Store], object]) -> int:
    counting = Faults()
    action(FaultyStore(store, counting))
    return len(counting.calls)


def at_every_call(
    store: Store,
    set_up: Callable[[Store], _S],
    work: Callable[[Store, _S], _R],
    others: Callable[[_S], _O],
    first: int = 0,
    more_than: int = 0,
) -> Iterator[tuple[_S, _R, list[_O]]]:
    """Others act before one call that some work makes of the store, before each in turn, from the first on.

    Each time the store is emptied and set up again. Yields what was set up, and what the work and the others returned.
    more_than: the work must make more calls, or the test shows less than it says.
    """

    def meet(at: int) -> tuple[_S, _R, list[_O]]:
        clear(store)
        scene, theirs = set_up(store), list[_O]()
        ours = work(FaultyStore(store, Interleaving(at, lambda: theirs.append(others(scene)))), scene)
        return scene, ours, theirs

    yield from map(meet, range(first, _calls_of(store, set_up, work, more_than)))


def failing_at_every_call(
    store: Store,
    set_up: Callable[[Store], _S],
    work: Callable[[Store, _S], object],
    mode: Mode = "before",
    more_than: int = 0,
) -> Iterator[_S]:
    """One call that some work makes of the store fails, each in turn. Yields what was set up."""
    for at in range(_calls_of(store, set_up, work, more_than)):
        clear(store)
        scene = set_up(store)
        with contextlib.suppress(StoreUnavailable):
            work(FaultyStore(store, Faults(at, mode)), scene)
        yield scene


def _calls_of(store: Store, set_up: Callable[[Store], _S], work: Callable[[Store, _S], object], more_than: int) -> int:
    clear(store)
    scene = set_up(store)
    calls = count_calls(store, lambda counting: work(counting, scene))
    assert calls > more_than
    return calls
