"""One small checkpoint with a little of everything the format has, and what must be read from it.

tests/data/format-1 holds the files that `write_frozen` wrote when format 1 was settled. From the first release on they
must stay readable for ever, and are never written again; until then a change of the format writes them again.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any

import numpy as np

from ckptstore import names
from ckptstore.codecs.chunk_codecs import fast
from ckptstore.commits.commit import commit_attempt
from ckptstore.format.documents import FORMAT, JSON, Content, Receipt, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import seal
from ckptstore.format.shards import (
    Placed,
    Slice,
    chunk_table,
    encode_chunk,
    place_slices,
    plan_chunks,
    raw_bytes,
    slice_tables,
)
from ckptstore.names import Attempt, RunKeys
from ckptstore.run import Run
from ckptstore.stores import Store

RUN = "frozen"
ATTEMPT = Attempt(1200, "01HF7YAT00ABCDEFGHJKMNPQRS")
MOMENT = 1_700_000_000.25
METRICS = {"loss": 0.125}
WORLD = 2


Parts = dict[Slice, bytes]
"""What one rank holds: slices and their bytes."""


def whole_entries() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name to dtype, shape and row-major little-endian bytes. Made by integer arithmetic only, equal everywhere."""
    mixed = np.arange(4096, dtype=np.uint64) * 2_654_435_761 % (1 << 32)
    mantissa = (mixed % (1 << 24)).astype(np.uint32)
    exponent = (118 + mixed // (1 << 24) % 5).astype(np.uint32)
    f32 = (mantissa & 0x7FFFFF) | (exponent << 23) | ((mantissa >> 23) << 31)
    f32[:6] = [0x7FC00001, 0xFFFFFFFF, 0x80000000, 1, 0x7F800000, 0]
    return {
        "model/weight": ("float32", (64, 64), f32.astype("<u4").tobytes()),
        "model/b16": ("bfloat16", (32, 33), (f32[: 32 * 33] >> 16).astype("<u2").tobytes()),
        "model/f16": ("float16", (1000,), (0x2C00 + (mantissa[:1000] & 0x0FFF)).astype("<u2").tobytes()),
        "model/ids": ("int64", (10, 10), np.arange(100, dtype="<i8").tobytes()),
        "model/noise": ("uint8", (256,), (mixed[:256] // 65_537 % 256).astype("u1").tobytes()),
        "model/scalar": ("int32", (), struct.pack("<i", -7)),
        "model/empty": ("float32", (0, 3), b""),
        "model/cast": ("bfloat16", (64, 64), _bfloat16(f32.astype(np.uint32)).astype("<u2").tobytes()),
        "optim/step": ("complex64", (1,), struct.pack("<ff", 1.5, -0.0)),
    }


def _bfloat16(f32: np.ndarray[Any, np.dtype[np.uint32]]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    rounded = (f32.astype(np.uint64) + 0x7FFF + (f32 >> 16 & 1) >> 16).astype(np.uint32)
    return np.where((f32 & 0x7FFFFFFF) > 0x7F800000, np.uint32(0xFFFF), rounded)


def sharded_entry() -> np.ndarray[Any, np.dtype[np.float64]]:
    """An entry whose boxes lie with both ranks."""
    return np.arange(6 * 10, dtype="<f8").reshape(6, 10) / 8


TREES: dict[str, JSON] = {
    "model": {"weight": {"$": "tensor", "name": "model/weight"}, "tied": {"$": "tensor", "name": "model/weight"}},
    "optim": {"$": "dict", "v": [[0, {"lr": 0.001, "betas": {"$": "tuple", "v": [0.9, 0.95]}}]]},
    "data": {"big": {"$": "int", "v": "0x1fffffffffffffffff"}, "best": {"$": "float", "v": "inf"}, "none": None},
}
ALIASES = {"model/tied": "model/weight"}
LOCAL: list[JSON] = [
    {"rng": {"$": "array", "dtype": "uint32", "shape": [2], "data": "AQAAAAIAAAA="}},
    {"rng": {"$": "bytes", "v": "AAEC"}},
]


def _parts(rank: int) -> Parts:
    array = sharded_entry()

    def piece(row: int, column: int, rows: int, columns: int) -> Parts:
        box = (row, column, rows, columns)
        data = array[row : row + rows, column : column + columns].tobytes()
        return {Slice("model/sharded", "float64", array.shape, box): data}

    if rank == 0:
        return {Slice.whole(n, dtype, shape): data for n, (dtype, shape, data) in whole_entries().items()} | piece(
            0, 0, 3, 10
        )
    return piece(3, 4, 3, 6) | piece(3, 0, 3, 4)


def _write_rank(store: Store, rank: int) -> StoredReceipt:
    parts = _parts(rank)
    derived = [piece for piece in parts if piece.entry == "model/cast"]
    placed = place_slices(piece for piece in parts if piece not in derived)
    sources = [Placed(piece, place.at) for piece in derived for place in placed if place.slice.entry == "model/weight"]
    raw = b"".join(parts[place.slice] for place in placed)
    assert len(raw) == raw_bytes(placed)
    chunks = [encode_chunk(span.of(memoryview(raw)), fast(span.dtype)) for span in plan_chunks(placed)]
    shard = names.shard_name(rank)
    with store.open_writer(RunKeys(RUN).shard(ATTEMPT, shard)) as writer:
        for chunk in chunks:
            writer.write(chunk.data)
    entries, slices = slice_tables(placed, sources)
    content = Content(
        shards=[Shard(name=shard, rank=rank, chunks=chunk_table(chunks))],
        entries=entries,
        slices=slices,
        aliases=ALIASES if rank == 0 else {},
        trees=TREES if rank == 0 else {},
    )
    receipt = Receipt(
        format=FORMAT, kind="receipt", run=RUN, step=ATTEMPT.step, attempt=str(ATTEMPT), rank=rank, world_size=WORLD,
        created_at=MOMENT, content=content, local=LOCAL[rank], metrics=METRICS,
    )  # fmt: skip
    data = seal(receipt)
    store.put(RunKeys(RUN).receipt(ATTEMPT, rank), data)
    return StoredReceipt.of(receipt, data)


def write_frozen(store: Store) -> None:
    commit_attempt(Run(store, RUN, lambda: MOMENT + 1), [_write_rank(store, rank) for rank in range(WORLD)])


def expected_entries() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    array = sharded_entry()
    found = {**whole_entries(), "model/sharded": ("float64", array.shape, array.tobytes())}
    assert all(prod(shape) or not data for _, shape, data in found.values())
    return found
