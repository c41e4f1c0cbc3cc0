"""The daemon's business logic: plain blocking code, run in threads, without HTTP and SQL."""

from collections.abc import Callable
from dataclasses import dataclass

from ckptapi.bodies import AttemptBody
from ckptd.services.accounts import Accounts
from ckptd.services.catalog import Catalog, Freshness
from ckptd.services.contents import Contents, Objects
from ckptd.services.events import Events
from ckptd.services.jobs import Jobs
from ckptd.services.restores import Restores
from ckptd.services.store_sync import StoreSync
from ckptd.services.tokens import Tokens
from ckptstore.operator import StoreOperator
from ckptstore.reading.source import StoreSource
from ckptstore.retention.deletion import Waste
from ckptstore.stores import Store
from ckptstore.stores.checks import StoreReport


@dataclass(kw_only=True)
class Services:
    """All services, as the API uses them."""

    accounts: Accounts
    catalog: Catalog
    contents: Contents
    events: Events
    freshness: Freshness
    jobs: Jobs
    objects: Objects
    operator: Callable[[str], StoreOperator]
    """Makes an operator of the store that acts for a caller; the index is up to date when one of its calls returns."""
    probe: Callable[[], StoreReport]
    """Runs the checks of the store."""
    restores: Restores
    source: StoreSource
    store: Store
    store_sync: StoreSync
    tokens: Tokens
    uploads: Callable[[str | None], list[AttemptBody]]
    """Live uploads of one run or all, oldest first; lists the store. Raises InvalidName or Unavailable."""
    waste: Callable[[], Waste | None]
    """Bytes that wait to be deleted, in all runs; None if this daemon has not measured them, or is not the leader."""


__all__ = [
    "Accounts",
    "Catalog",
    "Contents",
    "Events",
    "Freshness",
    "Jobs",
    "Objects",
    "Restores",
    "Services",
    "StoreSync",
    "Tokens",
]
