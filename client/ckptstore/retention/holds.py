"""What keeps checkpoints from being deleted, whatever a policy says: leases, pins, and references of others.

Whoever takes a hold writes it and then looks for a tombstone; whoever deletes writes a tombstone and then looks for
holds, and looks again before the sweep. With a store that shows every finished write to every later read, at
least one of the two sees the other and gives way (docs/decisions/0012).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ckptstore import references
from ckptstore.clock import Clock
from ckptstore.names import Attempt
from ckptstore.retention import leases, pins
from ckptstore.stores import Store

Holds = Mapping[Attempt, list[str]]
"""Why attempts must stay: `lease:HOLDER`, `pin:NAME`, `referenced:ID`."""


def active_holds(store: Store, run: str, clock: Clock) -> Holds:
    """Everything that holds checkpoints of a run now. A new kind of hold is added here, and nowhere else."""
    held: dict[Attempt, list[str]] = defaultdict(list)
    for attempt, names in pins.pinned(store, run).items():
        held[attempt] += [f"pin:{name}" for name in names]
    for attempt, holders in leases.active_leases(store, run, clock).items():
        held[attempt] += [f"lease:{holder}" for holder in holders]
    # Last: a saver holds what it references by a lease until the references are marked.
    for attempt, found in references.reasons(store, run).items():
        held[attempt] += found
    return dict(held)
