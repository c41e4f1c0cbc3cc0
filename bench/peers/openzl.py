"""OpenZL: exponents apart from signs and fractions, the exponents entropy-coded."""

from __future__ import annotations

import numpy as np
from openzl.ext import MAX_FORMAT_VERSION, CCtx, Compressor, CParam, DCtx, Input, Type, graphs, nodes

ITEM = {"float32": np.uint32, "bfloat16": np.uint16, "float16": np.uint16}
NODES = {
    "float32": nodes.Float32Deconstruct,
    "bfloat16": nodes.BFloat16Deconstruct,
    "float16": nodes.Float16Deconstruct,
}


class Openzl:
    """A graph as its authors use it for weights."""

    def __init__(self) -> None:
        self.compressors = {dtype: _compressor(dtype) for dtype in NODES}

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes:
        """One frame."""
        context = CCtx()
        context.ref_compressor(self.compressors[dtype])
        context.set_parameter(CParam.FormatVersion, MAX_FORMAT_VERSION)
        encoded: bytes = context.compress([Input(Type.Numeric, np.frombuffer(raw, ITEM[dtype]))])
        return encoded

    def decode(self, stored: bytes, dtype: str) -> memoryview:
        """The bytes that were encoded."""
        (output,) = DCtx().decompress(stored)
        return memoryview(output.content.as_nparray()).cast("B")


def _compressor(dtype: str) -> Compressor:
    compressor = Compressor()
    graph = NODES[dtype]()(compressor, sign_frac=graphs.Store()(compressor), exponent=graphs.Entropy()(compressor))
    compressor.select_starting_graph(graph)
    return compressor
