"""Pins: named holds of checkpoints that never expire, one object each.

The key of a pin says all that counts, so that a listing is enough, and a damaged pin still holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.commits import audit, leases, references
from ckptstore.commits.catalog import hidden_attempts
from ckptstore.errors import InvalidName, NoCheckpoint
from ckptstore.format.documents import FORMAT
from ckptstore.format.parsing import seal
from ckptstore.format.records import Action, Pin
from ckptstore.names import Attempt, checkpoint_id
from ckptstore.stores import Store


def pin(store: Store, run: str, attempt: Attempt, name: str, by: str, clock: Clock, reason: str = "") -> None:
    """Keep a checkpoint until the pin is removed; durable on return. Pinned under that name already is fine.

    Raises InvalidName, or NoCheckpoint if the checkpoint is being deleted: nothing is pinned then.
    """
    hold(store, run, attempt, name, by, clock, reason)
    if attempt in hidden_attempts(store, run):
        store.delete_many([names.pin_key(run, attempt, name)])
        raise NoCheckpoint(f"{checkpoint_id(run, attempt)} is being deleted", "ckptctl undelete takes that back")


def hold(store: Store, run: str, attempt: Attempt, name: str, by: str, clock: Clock, reason: str = "") -> None:
    """What `pin` does, of a hidden checkpoint too: that stays hidden, and is not swept. Raises InvalidName."""
    key = names.pin_key(run, attempt, name)
    audit.record(store, run, Action.PIN, [attempt], by, reason or name, clock)
    document = Pin(format=FORMAT, kind="pin", attempt=str(attempt), name=name, by=by, at=clock(), reason=reason)
    store.put(key, seal(document))


def unpin(store: Store, run: str, attempt: Attempt, name: str, by: str, clock: Clock) -> None:
    """Remove a pin; gone on return. One that is gone already is fine."""
    key = names.pin_key(run, attempt, name)
    audit.record(store, run, Action.UNPIN, [attempt], by, name, clock)
    store.delete_many([key])


def pinned(store: Store, run: str) -> dict[Attempt, list[str]]:
    """The names under which attempts are pinned."""
    found: dict[Attempt, list[str]] = defaultdict(list)
    for info in store.list(names.pins_prefix(run)):
        try:
            attempt, name = names.attempt_and_name(info.key)
        except InvalidName:
            continue  # not ours
        found[attempt].append(name)
    return dict(found)


Holds = Mapping[Attempt, list[str]]
"""Why attempts must stay: `lease:HOLDER`, `pin:NAME`, `referenced:ID`."""


def active_holds(store: Store, run: str, clock: Clock) -> Holds:
    """Everything that holds checkpoints of a run now. A new kind of hold is added here, and nowhere else."""
    held: dict[Attempt, list[str]] = defaultdict(list)
    for attempt, pin_names in pinned(store, run).items():
        held[attempt] += [f"pin:{name}" for name in pin_names]
    for attempt, holders in leases.active_leases(store, run, clock).items():
        held[attempt] += [f"lease:{holder}" for holder in holders]
    # Last: a saver holds what it references by a lease until the references are marked.
    for attempt, found in references.reasons(store, run).items():
        held[attempt] += found
    return dict(held)
