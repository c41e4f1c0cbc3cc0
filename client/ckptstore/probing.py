"""Whether a store keeps the promises that deleting rests on: create-only has one winner, and its clock is ours."""

from __future__ import annotations

from dataclasses import dataclass

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.errors import ClockSkew, StoreUnsafe
from ckptstore.names import new_ulid
from ckptstore.stores import Store

MAX_SKEW_S = 300.0
"""Ages are compared with graces of hours and of a week."""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a store did with a small object."""

    creates_once: bool
    """A second create of the same key was refused and changed nothing."""
    skew_s: float
    """How far the store's clock is ahead of ours, at least; 0 if it may be the same."""


def probe_store(store: Store, clock: Clock) -> Probe:
    """Create one small object twice, look at it, and delete it. Raises Unavailable."""
    key = f"{names.PROBES_PREFIX}{new_ulid(clock())}.json"
    before = clock()
    try:
        created = store.put_if_absent(key, b"first\n")
        after = clock()
        again = store.put_if_absent(key, b"second\n")
        kept = store.get(key) == b"first\n"
        written_at = next(info.modified_at for info in store.list(names.PROBES_PREFIX) if info.key == key)
    finally:
        store.delete_many([key])
    # File systems and S3 tell whole seconds.
    skew_s = min(0.0, written_at + 1 - before) + max(0.0, written_at - after)
    return Probe(created and not again and kept, skew_s)


def check_store(store: Store, clock: Clock) -> None:
    """Return if deletions may be judged and decided on this store now.

    Raises StoreUnsafe if it lets a create overwrite, ClockSkew if its clock and ours are minutes apart, or Unavailable.
    """
    probe = probe_store(store, clock)
    if not probe.creates_once:
        raise StoreUnsafe(
            f"{store.url} accepts create-only writes and overwrites",
            "Two parties could both win a decision: use a store that honours If-None-Match, nothing was deleted",
        )
    if abs(probe.skew_s) > MAX_SKEW_S:
        ahead = "ahead of" if probe.skew_s > 0 else "behind"
        raise ClockSkew(
            f"the clock of {store.url} is {abs(probe.skew_s):.0f} s {ahead} ours, {MAX_SKEW_S:.0f} s are allowed",
            "Set the clocks; until then nothing can be called old enough to be deleted",
        )
