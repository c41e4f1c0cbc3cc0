"""zstd frames: packed in three ways, unpacked only to the size that is expected. For any threads, without the GIL."""

from __future__ import annotations

import sys
import threading

import zstandard

from ckptstore.errors import CorruptObject

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

Buffer = bytes | bytearray | memoryview

_PARAMETER = zstd.CompressionParameter
_LITERAL_COMPRESSION = 1002  # ZSTD_c_literalCompressionMode, which has no name here; 1: always
# Steps as wide as a block leave nothing to search for. Searching takes most of the time, and finds nothing in noise.
_HUFFMAN_ONLY = {
    _PARAMETER.window_log: 17,
    _PARAMETER.hash_log: 6,
    _PARAMETER.chain_log: 6,
    _PARAMETER.min_match: 7,
    _PARAMETER.strategy: zstd.Strategy.fast,
    _PARAMETER.target_length: 1 << 17,
    _LITERAL_COMPRESSION: 1,
}


class _Contexts(threading.local):
    """Of each thread: making one takes as long as unpacking some ten thousand bytes."""

    def __init__(self) -> None:
        self.huffman = zstd.ZstdCompressor(options=_HUFFMAN_ONLY)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def pack(raw: Buffer, level: int) -> bytes:
    """One frame that states its content size."""
    return zstandard.ZstdCompressor(level=level).compress(raw)


def pack_huffman(raw: Buffer) -> bytes:
    """The same for bytes that come in no order, but some more often than others."""
    compressor = _contexts.huffman
    compressor.set_pledged_input_size(len(raw))
    return compressor.compress(raw, zstd.ZstdCompressor.FLUSH_FRAME)


def unpack(stored: Buffer, expected: int) -> bytes:
    """The content of a frame. Raises CorruptObject unless it is exactly so many bytes, and takes no more memory."""
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
