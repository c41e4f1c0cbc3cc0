"""The daemon's rules: plain blocking code, run in threads. No HTTP, no SQL."""

from dataclasses import dataclass

from ckptd.services.catalogue import Catalogue
from ckptd.services.freshness import Freshness
from ckptd.services.objects import Objects
from ckptd.services.protection import Protection
from ckptd.services.pruning import Pruning
from ckptd.services.restores import Restores
from ckptd.services.synchronizing import Synchronizing


@dataclass(frozen=True, slots=True)
class Services:
    """All of them, as the API uses them."""

    catalogue: Catalogue
    freshness: Freshness
    objects: Objects
    protection: Protection
    pruning: Pruning
    restores: Restores
    synchronizing: Synchronizing


__all__ = ["Catalogue", "Freshness", "Objects", "Protection", "Pruning", "Restores", "Services", "Synchronizing"]
