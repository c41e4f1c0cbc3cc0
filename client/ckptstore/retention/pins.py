"""Pins: named holds of checkpoints that never expire, one object each.

The key of a pin contains the attempt and the name, so that a listing is enough and a damaged pin still holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from ckptstore.commits import audit, leases, references
from ckptstore.commits.hidden import hidden_attempts
from ckptstore.errors import NoCheckpoint
from ckptstore.format.documents import FORMAT
from ckptstore.format.records import Action, Pin
from ckptstore.names import Attempt, check_pin
from ckptstore.run import Run
from ckptstore.values import Record


class NamedPin(Record):
    """One named hold of a checkpoint."""

    id: str
    name: str


Reasons = dict[Attempt, list[str]]
"""Why attempts stay, such as the names of their pins."""


def list_pins(run: Run) -> list[NamedPin]:
    """All pins of a run, newest step first."""
    found = sorted(pinned(run).items(), reverse=True)
    return [NamedPin(id=run.id_of(attempt), name=name) for attempt, pin_names in found for name in pin_names]


def pin(run: Run, attempt: Attempt, name: str, reason: str = "", thinned: bool = False) -> None:
    """Keep a checkpoint until the pin is removed; durable on return. Idempotent.

    thinned: without its optimizer state. Raises InvalidName, or NoCheckpoint if what is to be kept is being deleted: it
    is not pinned in that case.
    """
    write_pin(run, attempt, name, reason)
    if lost := hidden_attempts(run).lost(attempt, thinned):
        run.store.delete_many([run.keys.pin(attempt, name)])
        raise NoCheckpoint(f"{run.id_of(attempt)} is being {lost}", "ckptctl undelete restores it")


def write_pin(run: Run, attempt: Attempt, name: str, reason: str = "") -> None:
    """Like `pin`, but also pins a hidden checkpoint, which stays hidden and is not swept. Raises InvalidName."""
    check_pin(name)
    audit.record(run, Action.PIN, [attempt], reason or name)
    hold(run, attempt, name, reason)


def hold(run: Run, attempt: Attempt, name: str, reason: str = "") -> None:
    """Like `write_pin`, without a record in the audit log, which is about what people decide."""
    document = Pin(format=FORMAT, kind="pin", attempt=str(attempt), name=name, by=run.by, at=run.clock(), reason=reason)
    run.write(run.keys.pin(attempt, name), document)


def unpin(run: Run, attempt: Attempt, name: str) -> None:
    """Remove a pin. Idempotent."""
    key = run.keys.pin(attempt, name)
    audit.record(run, Action.UNPIN, [attempt], name)
    run.store.delete_many([key])


def pinned(run: Run) -> Reasons:
    """The names of the pins of each pinned attempt."""
    found: Reasons = defaultdict(list)
    for attempt, name, _ in run.listed(run.keys.pins):
        found[attempt].append(name)
    return dict(found)


Holds = Mapping[Attempt, list[str]]
"""Why attempts must stay: `lease:HOLDER`, `pin:NAME`, `referenced:ID`, `optimizer:ID`."""


def holds_optimizer(reasons: Iterable[str]) -> bool:
    """Whether one of these reasons also holds the optimizer state of a checkpoint. Pure."""
    return not all(reason.startswith(references.REFERENCED) for reason in reasons)


def active_holds(run: Run, hidden: Container[Attempt] = ()) -> Holds:
    """Everything that holds checkpoints of a run now, without references of `hidden` attempts. A new kind of hold is
    added only here."""
    held: Reasons = defaultdict(list)
    pins, leased = pinned(run), leases.active_leases(run)
    # Last: a saver protects what it references by a lease until it has written the marks.
    for kind, found in (("pin:", pins), ("lease:", leased), ("", references.reasons(run, hidden))):
        for attempt, reasons in found.items():
            held[attempt] += [kind + reason for reason in reasons]
    return dict(held)
