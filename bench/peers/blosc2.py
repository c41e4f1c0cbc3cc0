"""blosc2: bytes shuffled by their place in the number, zstd."""

from __future__ import annotations

import blosc2

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Blosc2:
    """One thread, its fastest level of zstd."""

    def encode(self, raw: memoryview | bytearray, dtype: str) -> bytes:
        """Less than 2 GB at once."""
        encoded: bytes = blosc2.compress2(
            raw,
            typesize=ITEM_BYTES[dtype],
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        )
        return encoded

    def decode(self, stored: bytes, dtype: str) -> bytes:
        """The bytes that were encoded."""
        raw: bytes = blosc2.decompress2(stored, nthreads=1)
        return raw
