"""Checkpoints of entries of any element type and any trees, and the bytes of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ckptstore.clock import system_clock
from ckptstore.codecs.chunk_codecs import fast
from ckptstore.commits.catalog import Checkpoint, from_outcome
from ckptstore.commits.commit import commit_attempt
from ckptstore.format.documents import FORMAT, Content, Receipt, Shard
from ckptstore.format.merging import StoredReceipt
from ckptstore.format.parsing import seal
from ckptstore.format.shards import Slice, chunk_table, encode_chunk, place_slices, plan_chunks, slice_tables
from ckptstore.names import Attempt, RunKeys, new_ulid
from ckptstore.run import Run
from ckptstore.stores import Store

TREES: dict[str, Any] = {
    "model": {
        "emb": {"$": "tensor", "name": "model/emb"},
        "head": {"$": "tensor", "name": "model/emb"},
        "bias": {"$": "array", "name": "model/bias"},
    },
    "optim": {
        "state": {"$": "dict", "v": [[0, {"m": {"$": "tensor", "name": "optim/m", "device": "cuda"}, "t": 3}]]},
        "betas": {"$": "tuple", "v": [0.9, {"$": "tensor", "name": "optim/beta"}]},
    },
    "scheduler": {
        "last": {"$": "float", "v": "inf"},
        "size": {"$": "size", "v": [2, 3]},
        "type": {"$": "dtype", "v": "bfloat16"},
        "milestones": {"$": "counter", "v": [[30, 1]]},
        "order": {"$": "odict", "v": [["b", {"$": "bytes", "v": "AAE="}]]},
        "number": {"$": "scalar", "dtype": "int64", "v": "BwAAAAAAAAA="},
    },
}
"""A model with tied weights, an optimizer and a scheduler."""
ENTRIES = [
    Slice.whole("model/emb", "bfloat16", (5, 3)), Slice.whole("model/bias", "float64", (3,)),
    Slice.whole("optim/m", "float8_e5m2", (0, 4)), Slice.whole("optim/beta", "uint16", ()),
]  # fmt: skip


def write_entries(
    store: Store, entries: list[Slice], trees: dict[str, Any], aliases: dict[str, str]
) -> tuple[Checkpoint, dict[str, bytes]]:
    """A checkpoint of entries with any bytes; also gives the bytes of each."""
    attempt, placed = Attempt(1, new_ulid(system_clock())), place_slices(entries)
    raw = np.random.default_rng(1).bytes(sum(entry.bytes for entry in entries))
    chunks = [encode_chunk(span.of(memoryview(raw)), fast(span.dtype)) for span in plan_chunks(placed)]
    with store.open_writer(RunKeys("r").shard(attempt, "shard-00000.ckpt")) as writer:
        for chunk in chunks:
            writer.write(chunk.data)
    tables = slice_tables(placed)
    shards = [Shard(name="shard-00000.ckpt", rank=0, chunks=chunk_table(chunks))]
    receipt = Receipt(
        format=FORMAT, kind="receipt", run="r", step=1, attempt=str(attempt), rank=0, world_size=1,
        created_at=system_clock(), local={}, metrics={},
        content=Content(shards=shards, entries=tables[0], slices=tables[1], aliases=aliases, trees=trees),
    )  # fmt: skip
    data = seal(receipt)
    store.put(RunKeys("r").receipt(attempt, 0), data)
    checkpoint = from_outcome(commit_attempt(Run(store, "r"), [StoredReceipt.of(receipt, data)]))
    assert checkpoint is not None
    return checkpoint, {p.slice.entry: raw[p.at : p.at + p.slice.bytes] for p in placed}


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
