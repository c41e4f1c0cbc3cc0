"""How small a trained state gets: per kind of tensor, against other libraries and the entropy, and as checkpoints.

A checkpoint's figure is its total size on the store, documents included. Every chunk of a size is encoded and
decoded, and checkpoints are restored and compared bit by bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from bench.codec import Ours, Zstd, chunks_of
from bench.kinds import Kind, kinds
from bench.measuring import problem
from bench.peers import open_codecs
from bench.peers.peer import Codec
from bench.report import Goal, Report
from bench.state import BYTES_PER_PARAMETER, State, trained, wanted_bytes
from ckpt import Checkpointer
from ckptstore.codecs.chunk_codecs import smallest

MOST_BYTES = 64 << 20
GOALS = {"fp32": 0.835, "bf16": 0.67}
PER_PARAMETER = 10.2
OVER_BOUND = 1.01


def measure(quick: bool) -> Report:
    """Sizes of tensors, then of checkpoints."""
    torch.set_num_threads(1)
    peers, problems = open_codecs()
    level = smallest("float32").level
    codecs: dict[str, Codec] = {"ours, fast": Ours(1), "ours, max": Ours(level), "zstd -1": Zstd(), **peers}  # type: ignore[dict-item]
    num_bytes = min(wanted_bytes(quick), 400_000_000)
    found = kinds(trained("fp32", num_bytes), MOST_BYTES // 4 if quick else MOST_BYTES)
    rows: list[tuple[str, ...]] = []
    worst = 0.0
    for kind in found:
        rows.append((kind.dtype, kind.name, "order-0 entropy", f"{kind.bound:.4f}", ""))
        for name, codec in codecs.items():
            try:
                share = _share(codec, kind)
            except Exception as error:  # a peer may raise anything
                problems[name] = problem(error)
                continue
            rows.append((kind.dtype, kind.name, name, f"{share:.4f}", f"{share / kind.bound:.4f}"))
            worst = max(worst, share / kind.bound) if name == "ours, fast" else worst
    stored, ratios = _checkpoints(num_bytes, rows)
    per_parameter = stored["mixed, derived"] * BYTES_PER_PARAMETER["mixed"]
    return Report(
        bench="size",
        what="stored / raw of a trained state; mixed: bfloat16 weights, float32 masters and moments",
        columns=("type", "of", "codec", "stored / raw", "/ entropy"),
        rows=rows,
        goals=[
            Goal("fp32 checkpoint", "raw", stored["fp32"], GOALS["fp32"], "at most"),
            Goal("bf16 checkpoint", "raw", stored["bf16"], GOALS["bf16"], "at most"),
            Goal("worst kind", "order-0 entropy", worst, OVER_BOUND, "at most"),
            Goal("mixed, derived", "bytes per parameter", per_parameter, PER_PARAMETER, "at most"),
        ],
        problems=problems,
        state_bytes=ratios,
        facts={f"stored / raw, {name}": share for name, share in stored.items()},
    )


def _share(codec: Codec, kind: Kind) -> float:
    chunks = chunks_of(kind)
    stored = 0
    for chunk in chunks:
        encoded = codec.encode(chunk, kind.dtype)
        stored += min(len(encoded), len(chunk))
        if bytes(codec.decode(encoded, kind.dtype)) != bytes(chunk):
            raise ValueError("the decoded bytes differ from the raw ones")
    return stored / sum(map(len, chunks))


def _checkpoints(num_bytes: int, rows: list[tuple[str, ...]]) -> tuple[dict[str, float], int]:
    """Stored bytes of whole checkpoints over raw bytes of their tensors; and the bytes of the largest state."""
    settings: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "fp32": ("fp32", {"compress": "fast"}),
        "fp32, max": ("fp32", {"compress": "max"}),
        "bf16": ("bf16", {"compress": "fast"}),
        "mixed": ("mixed", {"compress": "fast"}),
        "mixed, derived": ("mixed", {"compress": "fast", "dedup_casts": True}),
    }
    stored: dict[str, float] = {}
    largest = 0
    for name, (kind, knobs) in settings.items():
        state = trained(kind, num_bytes if kind != "bf16" else num_bytes // 4)
        stored[name] = _stored_bytes(state, knobs) / state.num_bytes
        largest = max(largest, state.num_bytes)
        rows.append(("checkpoint", name, "ours", f"{stored[name]:.4f}", ""))
    return stored, largest


def _stored_bytes(state: State, knobs: Mapping[str, Any]) -> int:
    digest = state.digest()
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpointer(folder, run="size", max_references=0, overlap=False, **knobs) as checkpointer,
    ):
        saved = checkpointer.save(state.model, state.optim, step=1)
        state.forget()
        checkpointer.restore(state.model, state.optim)
        if state.digest() != digest:
            raise ValueError("the restored state differs from the saved one")
        return saved.stored_bytes + saved.manifest_bytes
