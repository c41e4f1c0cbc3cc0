"""How fast one core encodes and decodes chunks, and how small they get, for numbers distributed as trained weights are.

Trained weights are close to normal, with a scale that differs from row to row; so are these.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from bench.report import Goal, Report
from ckptstore.codecs import FLOAT_SPLIT, ZSTD, decode, encode
from ckptstore.shards import CHUNK_BYTES

GOAL = 0.85
"""Stored size of float32 weights, as a part of the raw one."""
REPETITIONS = 5
ROW = 4096


def measure(quick: bool) -> Report:
    """Measure float-split and, to compare, zstd."""
    torch.set_num_threads(1)
    num_chunks = 2 if quick else 16
    rows, ratios = [], {}
    for dtype in ("float32", "bfloat16", "float16"):
        raw = weights(getattr(torch, dtype), num_chunks)
        for codec in (FLOAT_SPLIT[dtype], ZSTD):
            stored_bytes, encode_s, decode_s = run(codec, raw)
            ratios[codec, dtype] = stored_bytes / len(raw)
            speeds = (f"{len(raw) / seconds / 1e9:.2f} GB/s" for seconds in (encode_s, decode_s))
            rows.append((dtype, codec.partition("/")[0], f"{ratios[codec, dtype]:.3f}", *speeds))
    return Report(
        bench="codec",
        what=f"{num_chunks} chunks of {CHUNK_BYTES >> 20} MiB, one core, median of {REPETITIONS}",
        columns=("dtype", "codec", "stored / raw", "encode", "decode"),
        rows=rows,
        goals=[Goal("float32, stored", "raw", ratios[FLOAT_SPLIT["float32"], "float32"], GOAL, "at most")],
    )


def weights(dtype: torch.dtype, num_chunks: int) -> memoryview:
    """Bytes of so many chunks of weights."""
    generator = torch.Generator().manual_seed(0)
    count = num_chunks * CHUNK_BYTES // dtype.itemsize
    scales = 0.02 * torch.exp(0.5 * torch.randn(count // ROW, 1, generator=generator))
    values = (scales * torch.randn(count // ROW, ROW, generator=generator)).to(dtype)
    return memoryview(values.view(torch.uint8).numpy().reshape(-1).data)


def run(codec: str, raw: memoryview) -> tuple[int, float, float]:
    """Stored bytes, and seconds to encode and to decode all chunks."""
    chunks = [raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES)]
    into = memoryview(np.ones(CHUNK_BYTES, dtype=np.uint8).data)
    encode_s, decode_s = [], []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        encoded = [encode(codec, chunk) for chunk in chunks]
        encode_s.append(time.perf_counter() - began)
        joined = [(used, memoryview(data)) for used, data in encoded]
        began = time.perf_counter()
        for used, stored in joined:
            decode(used, stored, into)
        decode_s.append(time.perf_counter() - began)
    return sum(len(stored) for _, stored in joined), median(encode_s), median(decode_s)
