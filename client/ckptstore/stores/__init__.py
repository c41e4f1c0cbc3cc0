"""Bytes by key, on any fsspec file system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import xxhash

from ckptstore.errors import InvalidRequest
from ckptstore.stores.base import (
    CACHED_BYTES,
    PARALLEL_READS,
    ObjectInfo,
    ObjectReader,
    ObjectWriter,
    RangeReader,
    Store,
    WrappedStore,
    store_errors,
)
from ckptstore.stores.local import LocalStore
from ckptstore.stores.remote import FsspecStore

__all__ = [
    "CACHED_BYTES", "PARALLEL_READS", "ObjectInfo", "ObjectReader", "ObjectWriter", "RangeReader", "Store",
    "WrappedStore", "open_store", "resolve_url",
]  # fmt: skip

REHEARSAL = "CKPT_REHEARSAL"
"""Set by `ckptctl rehearse`: the folder that takes the place of every store, so that nothing else is written."""
_LOCAL = ("file", "local")
_S3, _GCS, _AZURE = ("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "az")
# A cached listing may lack a checkpoint that was just committed.
_FRESH = {"use_listings_cache": False}
# Current services accept signature version 4, also in signed URLs.
_S3_CONFIG = {"max_pool_connections": 64, "signature_version": "s3v4"}


def resolve_url(url: str) -> str:
    """The URL of the same store for any working directory: paths and file:// become absolute, others stay as given.

    In a rehearsal it is a folder below the rehearsal's. Raises InvalidRequest.
    """
    folder = os.environ.get(REHEARSAL)
    if folder and folder not in url:
        url = f"{folder}/{xxhash.xxh3_64_hexdigest(url.encode())}"
    scheme, path = _split(url)
    return LocalStore(path).url if scheme in _LOCAL and path else url


def _split(url: str) -> tuple[str, str]:
    scheme, separator, path = url.partition("://")
    if not separator and url.startswith("file:/"):
        raise InvalidRequest(f"store URL {url!r} has one slash too few", "Write file:///folder or a path")
    return (scheme, path) if separator else ("file", url)


def is_local(url: str) -> bool:
    """Whether the scheme of a store's URL, or a path, names a folder or the memory of this host."""
    return _split(url)[0] in (*_LOCAL, "memory")


def open_store(url: str, options: Mapping[str, Any] | None = None, retried: bool = False) -> Store:
    """The store at `url`: a path, file://, memory://, s3:// or any other fsspec scheme.

    options: storage options of the fsspec file system (endpoint_url, key, ...). Environment variables of fsspec and of
    the service's library (FSSPEC_S3_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...) apply too. retried: the caller repeats
    requests itself (RetryingStore). Otherwise they are tried six to 25 times: with its time-outs, a service that does
    not answer then fails a request after six minutes. Raises InvalidRequest or StoreUnavailable; nothing is written.
    """
    scheme, path = _split(resolve_url(url) if REHEARSAL in os.environ else url)
    if scheme in ("", *_LOCAL):
        if not scheme or not path:
            raise InvalidRequest(f"store URL {url!r} names no folder", "Write file:///folder or a path")
        return LocalStore(path)
    import fsspec  # late: it looks through all installed packages

    try:
        implementation: Any = fsspec.get_filesystem_class(scheme)  # type: ignore[no-untyped-call]
    except (ImportError, ValueError) as error:
        raise InvalidRequest(
            f"store URL {url!r} has scheme {scheme!r}, which is not available: {error}",
            "Use file://, or install the scheme's fsspec package (pip install 'ckptd[s3]', [gcs] or [azure])",
        ) from error
    if scheme in _GCS:
        # The default asks for the type of a bucket by gRPC first, and waits a minute where only HTTP gets through.
        from gcsfs.core import GCSFileSystem

        implementation = GCSFileSystem
    options = dict(options or {})
    if scheme != "memory":
        options |= _FRESH
    if scheme in _S3:
        tries = {"retries": {"total_max_attempts": 1}} if retried else {}
        options["config_kwargs"] = {**_S3_CONFIG, **tries, **(options.get("config_kwargs") or {})}
    with store_errors("open", url):
        fs = implementation(**options)
        # These need packages that are installed with the service's library.
        if scheme in (*_GCS, *_AZURE):
            from ckptstore.stores.clouds import AzureStore, GcsStore

            return (GcsStore if scheme in _GCS else AzureStore)(fs, url, retried)
        if scheme not in _S3:
            return FsspecStore(fs, url)
        from ckptstore.stores.s3 import S3Store

        if retried:
            fs.retries = 1  # fsspec gives the same object to those with the same options
        return S3Store(fs, url, retried)
