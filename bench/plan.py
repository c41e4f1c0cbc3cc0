"""How long one rank of 2048 takes to plan its restore from a manifest of a million slices, and in how much memory.

The manifest is that of 4096 ranks which each hold an even part of 244 entries along the first dimension. Its digests
are random, so they do not compress. The functions of the product write and parse it, in separate processes, so the
measured memory is theirs. Times are processor time of the one working thread, which equals wall time on an idle core.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from bench.report import Goal, Report
from ckptstore import names
from ckptstore.format.boxes import Want
from ckptstore.format.columns import column
from ckptstore.format.documents import FORMAT, Chunks, Content, Entries, Manifest, ReceiptRef, Shard, Slices
from ckptstore.format.parsing import pack_manifest, parse_manifest
from ckptstore.format.planning import plan_reads
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.restore_check import rows_of

GOAL_S = 1.0
MEMORY_BYTES = 1 << 30
BYTES_PER_SLICE = 100
RANKS = 4096
READERS = 2048
READER = 1000
REPETITIONS = 5
SHAPES = [(50257, 8192), *[(8192, 8192), (8192, 8192), (8192, 1024), (28672, 8192), (8192, 28672), (8192,)] * 40]
SHAPES += [(8192,), (50257, 8192), (8192, 8192)]
ITEM = 4


def measure(quick: bool) -> Report:
    """Write a manifest, then plan in fresh processes."""
    ranks = RANKS // 16 if quick else RANKS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "manifest.json.zst")
        written = in_fresh_process("write", path, ranks)
        plans = [in_fresh_process("plan", path, ranks) for _ in range(REPETITIONS)]
    usual = {name: median(plan[name] for plan in plans) for name in plans[0]}
    per_slice = written["stored_bytes"] / written["slices"]
    return Report(
        bench="plan",
        what=f"{written['slices']} slices of {ranks} ranks to one rank of {ranks // 2}; median of {REPETITIONS}",
        columns=("", "", "goal"),
        rows=[
            ("parse and check", f"{usual['parse_s']:.2f} s", ""),
            ("plan", f"{usual['plan_s']:.2f} s", ""),
            ("parse, check and plan", f"{usual['total_s']:.2f} s", f"{GOAL_S:.0f} s"),
            ("peak memory of the process", f"{usual['peak_bytes'] / 1e6:.0f} MB", f"{MEMORY_BYTES / 1e6:.0f} MB"),
            ("manifest, per slice", f"{per_slice:.1f} B", f"{BYTES_PER_SLICE} B"),
            ("stored bytes fetched / raw bytes needed", f"{usual['fetched_over_needed']:.3f}", ""),
        ],
        goals=[
            Goal("parse, check and plan", "a second", usual["total_s"], GOAL_S, "at most"),
            Goal("peak memory", "1 GiB", usual["peak_bytes"] / MEMORY_BYTES, 1.0, "at most"),
            Goal("manifest", "100 bytes per slice", per_slice / BYTES_PER_SLICE, 1.0, "at most"),
        ],
        facts={**usual, "bytes_per_slice": per_slice, "slices": written["slices"]},
    )


def in_fresh_process(part: str, path: Path, ranks: int) -> dict[str, float]:
    """Result of one part of the benchmark."""
    command = [sys.executable, "-m", "bench.plan", part, str(path), str(ranks)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def write(path: Path, ranks: int) -> dict[str, float]:
    """Write the manifest."""
    manifest = made_up(ranks)
    data = pack_manifest(manifest)
    path.write_bytes(data)
    return {"stored_bytes": len(data), "slices": len(manifest.content.slices.entry)}


def plan(path: Path, ranks: int) -> dict[str, float]:
    """Parse the manifest and plan the reads of one rank of half as many."""
    data = path.read_bytes()
    began = time.process_time()
    content = parse_manifest(data, "manifest").content
    parsed = time.process_time()
    wants = [
        Want(name, (first, *(0 for _ in shape[1:]), rows, *shape[1:]), name)
        for name, shape in zip(content.entries.name, content.entries.shape, strict=True)
        for first, rows in [rows_of(shape[0], READER % (ranks // 2), ranks // 2)]
    ]
    reads = plan_reads(content, wants)
    planned = time.process_time()
    chunks = [chunk for read in reads for chunk in read.chunks]
    needed = sum(piece.bytes for chunk in chunks for piece in chunk.pieces)
    return {
        "parse_s": parsed - began,
        "plan_s": planned - parsed,
        "total_s": planned - began,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "fetched_over_needed": sum(read.bytes for read in reads) / needed,
    }


def made_up(ranks: int) -> Manifest:
    """A manifest of so many ranks."""
    rng = np.random.default_rng(0)
    held = [slices_of(rank, ranks) for rank in range(ranks)]
    attempt = Attempt(1000, new_ulid(1_700_000_000.0))
    return Manifest(
        format=FORMAT, kind="manifest", run="bench", step=1000, attempt=str(attempt), world_size=ranks,
        created_at=1_700_000_000.0, metrics={},
        receipts=[ReceiptRef(rank=rank, digest=rng.bytes(16).hex(), bytes=100_000) for rank in range(ranks)],
        content=Content(
            shards=[shard_of(rank, rows, rng) for rank, rows in enumerate(held)],
            entries=Entries(
                name=[f"model/layer.{number}.weight" for number in range(len(SHAPES))],
                dtype=["float32"] * len(SHAPES),
                shape=[list(shape) for shape in SHAPES],
            ),
            slices=Slices(
                entry=column(row[0] for rows in held for row in rows),
                shard=column(rank for rank, rows in enumerate(held) for _ in rows),
                at=column(row[1] for rows in held for row in rows),
                box=column(number for rows in held for row in rows for number in row[3]),
            ),
            aliases={},
            trees={},
        ),
    )  # fmt: skip


Row = tuple[int, int, int, tuple[int, ...]]
"""Entry, byte of the raw stream, bytes, box."""


def slices_of(rank: int, ranks: int) -> list[Row]:
    """Non-empty boxes of a rank."""
    rows: list[Row] = []
    at = 0
    for entry, shape in enumerate(SHAPES):
        first, count = rows_of(shape[0], rank, ranks)
        size = int(np.prod([count, *shape[1:]])) * ITEM
        if size:
            rows.append((entry, at, size, (first, *(0 for _ in shape[1:]), count, *shape[1:])))
            at += size
    return rows


def shard_of(rank: int, rows: list[Row], rng: np.random.Generator) -> Shard:
    """A shard in which each slice is a chunk."""
    raw = column(size for _, _, size, _ in rows)
    chunks = Chunks(
        raw=raw,
        stored=raw - rng.integers(0, raw // 4 + 1),
        codec=np.zeros(len(rows), np.int64),
        codecs=["float-split/float32"],
        digest=rng.bytes(16 * len(rows)),
    )
    return Shard(name=names.shard_name(rank), rank=rank, chunks=chunks)


if __name__ == "__main__":
    parts = {"write": write, "plan": plan}
    print(json.dumps(parts[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))))
