"""Bytes by key, on any fsspec file system."""

from ckptstore.stores.base import PARALLEL_READS, ObjectInfo, ObjectReader, ObjectWriter, RangeReader, Store
from ckptstore.stores.opening import open_store
from ckptstore.stores.wrapping import WrappedStore

__all__ = [
    "PARALLEL_READS", "ObjectInfo", "ObjectReader", "ObjectWriter", "RangeReader", "Store", "WrappedStore",
    "open_store",
]  # fmt: skip
