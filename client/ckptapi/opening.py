"""Opens a source of checkpoints by URL: a store, or a daemon that serves one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptstore import names
from ckptstore.reading.source import Source, StoreSource
from ckptstore.stores import open_store
from ckptstore.stores.local import LocalStore
from ckptstore.stores.retrying import RetryingStore
from ckptstore.tiers.source import TieredSource


def open_source(
    url: str,
    token: str | None = None,
    options: Mapping[str, Any] | None = None,
    patience_s: float = 0.0,
    cacert: str | None = None,
    local: str | None = None,
) -> Source:
    """The daemon at an http(s):// URL, or the store at any other one.

    patience_s: how long requests are repeated if the daemon or the store does not respond. cacert: a file with the
    certificates of authorities, against which the daemon's certificate is checked instead of the system's. local: a
    store that is read first; `url` is then that of a store.
    """
    if url.startswith(("http://", "https://")):
        # Imported late: trainers that read from the store do not need the HTTP client.
        from ckptapi.client import DaemonClient

        return DaemonClient(url, token, patience_s=patience_s, cacert=cacert)
    # Beside a local tier, a restore does not wait for minutes: it uses what is local.
    store = open_store(url, options, retried=patience_s > 0 or local is not None)
    if local is not None:
        from ckptapi.hosts import open_local  # loads an HTTP client

        return TieredSource(open_local(local), store, RetryingStore(store, patience_s))
    if isinstance(store, LocalStore) and (store.root / names.HOSTS).is_dir():  # a local tier that hosts do not share
        from ckptapi.hosts import HostsStore  # loads an HTTP client

        return StoreSource(HostsStore(store))
    return StoreSource(RetryingStore(store, patience_s) if patience_s else store)
