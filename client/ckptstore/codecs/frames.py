"""zstd frames: compressed in two ways, decompressed only to the expected size. Thread-safe; releases the GIL."""

from __future__ import annotations

import threading

import zstandard

from ckptstore.errors import CorruptObject

Buffer = bytes | bytearray | memoryview

# The smallest hash table and the longest match: the match finder finds almost nothing, and skips ahead in noise.
# A target length would make it skip further, but turns off Huffman coding, which is what these frames are for.
_HUFFMAN = zstandard.ZstdCompressionParameters(
    window_log=17, hash_log=6, chain_log=6, min_match=7, target_length=0, strategy=zstandard.STRATEGY_FAST
)


class _Contexts(threading.local):
    """One per thread: creating a context takes as long as decompressing about 10,000 bytes."""

    def __init__(self) -> None:
        self.huffman = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(raw: Buffer, level: int) -> bytes:
    """One frame that states its content size."""
    return zstandard.ZstdCompressor(level=level).compress(raw)


def pack_huffman(raw: Buffer) -> bytes:
    """One frame that states its content size, for bytes whose frequencies differ but whose order is noise."""
    return _contexts.huffman.compress(raw)


def unpack(stored: Buffer, expected: int) -> bytes:
    """The content of a frame. Raises CorruptObject unless it has exactly `expected` bytes; allocates no more."""
    try:
        size = zstandard.frame_content_size(stored)
        if size != expected:
            raise CorruptObject(f"zstd frame holds {size} bytes, its document says {expected}")
        raw = _contexts.decompressor.decompress(stored, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptObject(f"zstd frame cannot be decoded: {error}") from error
    if len(raw) != expected:  # a skippable frame claims a size and unpacks to nothing
        raise CorruptObject(f"zstd frame unpacks to {len(raw)} bytes, its document says {expected}")
    return raw
