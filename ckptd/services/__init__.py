"""The daemon's business logic: plain blocking code, run in threads, without HTTP and SQL."""

from collections.abc import Callable
from dataclasses import dataclass

from ckptd.services.accounts import Accounts
from ckptd.services.catalog import Catalog
from ckptd.services.contents import Contents
from ckptd.services.events import Events
from ckptd.services.freshness import Freshness
from ckptd.services.jobs import Jobs
from ckptd.services.objects import Objects
from ckptd.services.pruning import Pruning
from ckptd.services.remote_create import RemoteCreateService
from ckptd.services.restores import Restores
from ckptd.services.retention import Leases, Retention
from ckptd.services.retention_view import RetentionViews
from ckptd.services.state_history import StateHistory
from ckptd.services.store_sync import StoreSync
from ckptd.services.tokens import Tokens
from ckptd.services.uploads import Uploads
from ckptstore.stores.checks import StoreReport


@dataclass(frozen=True, slots=True)
class Services:
    """All services, as the API uses them."""

    accounts: Accounts
    catalog: Catalog
    contents: Contents
    events: Events
    freshness: Freshness
    jobs: Jobs
    leases: Leases
    objects: Objects
    probe: Callable[[], StoreReport]
    """Runs the checks of the store."""
    pruning: Pruning
    remote_create: RemoteCreateService
    restores: Restores
    retention: Retention
    retention_views: RetentionViews
    state_history: StateHistory
    store_sync: StoreSync
    tokens: Tokens
    uploads: Uploads


__all__ = [
    "Accounts",
    "Catalog",
    "Contents",
    "Events",
    "Freshness",
    "Jobs",
    "Leases",
    "Objects",
    "Pruning",
    "RemoteCreateService",
    "Restores",
    "Retention",
    "RetentionViews",
    "Services",
    "StateHistory",
    "StoreSync",
    "Tokens",
    "Uploads",
]
