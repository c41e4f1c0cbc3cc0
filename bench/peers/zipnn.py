"""zipnn: bytes grouped by their place in the number, Huffman or zstd."""

from __future__ import annotations

from zipnn import ZipNN


class Zipnn:
    """One thread; its own choice of method and chunks of 256 KiB."""

    def __init__(self) -> None:
        self.by_dtype = {
            dtype: ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
            for dtype in ("float32", "bfloat16", "float16")
        }

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes:
        """It changes its input in place, so it gets a copy; a bytearray is its own already."""
        encoded: bytes = self.by_dtype[dtype].compress(raw if isinstance(raw, bytearray) else bytearray(raw))
        return encoded

    def decode(self, stored: bytes, dtype: str) -> bytes:
        """The bytes that were encoded."""
        raw: bytes = self.by_dtype[dtype].decompress(stored)
        return raw
