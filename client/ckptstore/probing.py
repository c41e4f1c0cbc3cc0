"""Whether a store keeps the promises that decisions rest on: create-only has one winner, and its clock is ours."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.errors import ClockSkew, StoreReadOnly, StoreUnsafe
from ckptstore.names import new_ulid
from ckptstore.stores import Store

logger = logging.getLogger(__name__)

MAX_SKEW_S = 300.0
"""Ages are compared with graces of hours and of a week."""
_RACES = 3
_RACERS = 2  # of more, SeaweedFS makes one wait for a second

_found: dict[str, bool] = {}
_probing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Probe:
    """What a store did with some small objects."""

    refuses_second: bool
    """A second create of the same key was refused and changed nothing."""
    one_wins: bool
    """Of two at once one won."""
    skew_s: float
    """How far the store's clock is ahead of ours, at least; 0 if it may be the same."""

    @property
    def creates_once(self) -> bool:
        """A create can decide something."""
        return self.refuses_second and self.one_wins


def probe_store(store: Store, clock: Clock) -> Probe:
    """Create small objects twice, one after the other and at once, and delete them. Raises Unavailable."""
    with _scratch(store, clock) as key:
        before = clock()
        created = store.put_if_absent(key, b"first\n")
        after = clock()
        again = store.put_if_absent(key, b"second\n")
        kept = store.get(key) == b"first\n"
        written_at = next(info.modified_at for info in store.list(names.PROBES_PREFIX) if info.key == key)
    # File systems and S3 tell whole seconds.
    skew_s = min(0.0, written_at + 1 - before) + max(0.0, written_at - after)
    refuses_second = created and not again and kept
    return Probe(refuses_second, all(_one_wins(store, clock) for _ in range(_RACES)), skew_s)


def creates_once(store: Store, clock: Clock) -> bool:
    """Whether create-only has one winner on this store. Asked of a store once in a process. Raises Unavailable."""
    if store.creates_by_itself:
        return True
    with _probing:
        if store.identity not in _found:
            _found[store.identity] = _find_out(store, clock)
        return _found[store.identity]


def check_store(store: Store, clock: Clock) -> None:
    """Return if deletions may be judged and decided on this store now.

    Raises StoreUnsafe if it lets a create overwrite, ClockSkew if its clock and ours are minutes apart, or Unavailable.
    """
    probe = probe_store(store, clock)
    if not (probe.creates_once or store.arbitrated):
        raise StoreUnsafe(
            f"{store.url} accepts create-only writes and overwrites",
            "Two parties could both win a decision: delete through a daemon, whose database decides, or use a store "
            "that honours If-None-Match; nothing was deleted",
        )
    if abs(probe.skew_s) > MAX_SKEW_S:
        ahead = "ahead of" if probe.skew_s > 0 else "behind"
        raise ClockSkew(
            f"the clock of {store.url} is {abs(probe.skew_s):.0f} s {ahead} ours, {MAX_SKEW_S:.0f} s are allowed",
            "Set the clocks; until then nothing can be called old enough to be deleted",
        )


def _find_out(store: Store, clock: Clock) -> bool:
    try:
        return probe_store(store, clock).creates_once
    except StoreReadOnly as error:
        # Credentials may be good for one run only.
        logger.warning(
            "cannot find out whether %s overwrites on create, and hope that it does not: %s", store.url, error
        )
        return True


def _one_wins(store: Store, clock: Clock) -> bool:
    with _scratch(store, clock) as key, ThreadPoolExecutor(_RACERS) as pool:
        proposals = [f"racer {number}\n".encode() for number in range(_RACERS)]
        won = list(pool.map(partial(store.put_if_absent, key), proposals))
        kept = store.get(key)
    # After a lost reply nobody may know that he has won; whoever does must be right.
    return all(kept == proposal for proposal, first in zip(proposals, won, strict=True) if first)


@contextmanager
def _scratch(store: Store, clock: Clock) -> Iterator[str]:
    key = f"{names.PROBES_PREFIX}{new_ulid(clock())}.json"
    try:
        yield key
    finally:
        store.delete_many([key])
