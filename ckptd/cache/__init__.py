"""The block cache: N readers of the same bytes cost the store one read."""

from ckptd.cache.blocks import BlockCache
from ckptd.cache.extents import BLOCK_BYTES
from ckptd.cache.folder import open_folder

__all__ = ["BLOCK_BYTES", "BlockCache", "open_folder"]
