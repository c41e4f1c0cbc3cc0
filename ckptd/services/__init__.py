"""The daemon's rules: plain blocking code, run in threads. No HTTP, no SQL."""

from collections.abc import Callable
from dataclasses import dataclass

from ckptd.services.catalog import Catalog
from ckptd.services.contents import Contents
from ckptd.services.deciding import Proposals
from ckptd.services.events import Events
from ckptd.services.freshness import Freshness
from ckptd.services.jobs import Jobs
from ckptd.services.keeping import Keeping
from ckptd.services.objects import Objects
from ckptd.services.protection import Protection
from ckptd.services.pruning import Pruning
from ckptd.services.restores import Restores
from ckptd.services.retention import Retention
from ckptd.services.synchronizing import Synchronizing
from ckptd.services.tokens import Tokens
from ckptd.services.uploads import Uploads
from ckptstore.commits.store_check import StoreReport


@dataclass(frozen=True, slots=True)
class Services:
    """All of them, as the API uses them."""

    catalog: Catalog
    contents: Contents
    events: Events
    freshness: Freshness
    jobs: Jobs
    keeping: Keeping
    objects: Objects
    probe: Callable[[], StoreReport]
    """Examines the store."""
    proposals: Proposals
    protection: Protection
    pruning: Pruning
    restores: Restores
    retention: Retention
    synchronizing: Synchronizing
    tokens: Tokens
    uploads: Uploads


__all__ = [
    "Catalog",
    "Contents",
    "Events",
    "Freshness",
    "Jobs",
    "Keeping",
    "Objects",
    "Proposals",
    "Protection",
    "Pruning",
    "Restores",
    "Retention",
    "Services",
    "Synchronizing",
    "Tokens",
    "Uploads",
]
