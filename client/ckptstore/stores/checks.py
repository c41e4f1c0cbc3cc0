"""Checks of a store: whether it keeps the guarantees that checkpoints need, and how fast it is for one rank.

All objects lie below `_probes/`, and are removed also after an error and after an interrupt (Ctrl-C).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from typing import NamedTuple

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.errors import (
    CkptError,
    CorruptObject,
    InvalidRequest,
    StoreReadOnly,
    StoreUnsafe,
)
from ckptstore.format.documents import digest
from ckptstore.format.shards import CHUNK_BYTES
from ckptstore.names import new_ulid
from ckptstore.stores.base import Store
from ckptstore.threads import in_parallel
from ckptstore.values import Record

logger = logging.getLogger(__name__)

_SKEW_ALLOWED_S = 60.0
_DATA = bytes(range(256)) * 256


class StoreCheck(Record):
    """One thing that a store must do."""

    name: str
    ok: bool
    seconds: float
    detail: str = ""


class StoreReport(Record):
    """The results of all checks of a store."""

    store: str
    ok: bool
    """All checks passed."""
    conditional_writes: bool
    """Exactly one of several concurrent creators of a key succeeds. Otherwise two committers could both win."""
    clock_skew_s: float | None
    """The store's clock minus this machine's; None if it could not be measured."""
    checks: list[StoreCheck]
    client: str = ""
    """The library that reaches the store, with its version; of an older daemon empty, as the next one."""
    create_only: str = ""
    """How a create is refused if the object exists."""
    races: str = ""
    """Concurrent creates that had one winner, of how many."""


def run_store_checks(store: Store, clock: Clock) -> StoreReport:
    """Write, read, list, create concurrently and delete some small objects. Without the first write, nothing else."""
    folder = f"{names.PROBES_PREFIX}{new_ulid(clock())}/"
    key, checks = folder + "object", list[StoreCheck]()
    probed: Probe | None = None

    @contextmanager
    def checking(name: str) -> Iterator[None]:
        """Add a check of this name, which fails if an error is raised meanwhile."""
        began, problem = time.perf_counter(), ""
        try:
            yield
        except CkptError as error:
            problem = str(error)
        checks.append(StoreCheck(name=name, ok=not problem, seconds=time.perf_counter() - began, detail=problem))

    try:
        with checking("write"):
            _check_bucket(store)
            store.put(key, _DATA)
        if checks[0].ok:  # whatever else fails otherwise has the same cause
            with checking("read"):
                _require(store.get(key) == _DATA, "a read returns other bytes than written")
            with checking("read a range"):
                buffer = memoryview(bytearray(1000))
                store.get_range(key, 500, buffer)
                _require(bytes(buffer) == _DATA[500:1500], "a ranged read returns other bytes than a full read")
            with checking("list"):
                listed = {info.key: info.bytes for info in store.list(folder)}
                _require(listed == {key: len(_DATA)}, f"a listing shows {listed}")
            with checking("create once"):
                probed = probe_store(store, clock)
                _require(probed.refuses_second, "a second create of the same object was accepted")
            with checking("one winner"):
                one = _known(probed).races_won == _RACES
                _require(one, "concurrent creates of an object did not have exactly one winner")
            with checking("clock"):
                skew_s = _known(probed).skew_s
                _require(abs(skew_s) <= _SKEW_ALLOWED_S, f"the store's clock is {skew_s:+.0f} s from this machine's")
            with checking("delete"):
                store.delete_many([key])
                _require(store.find(key) is None, "an object is still readable after its deletion")
    finally:
        with suppress(CkptError):  # the checks have reported the problem
            store.delete_many([info.key for info in store.list(folder)])
    return StoreReport(
        store=store.url,
        ok=all(check.ok for check in checks),
        conditional_writes=bool(probed and probed.creates_once),
        clock_skew_s=probed.skew_s if probed else None,
        checks=checks,
        client=store.client,
        create_only=store.create_only,
        races=f"{probed.races_won} of {_RACES}" if probed else "",
    )


def _require(kept: bool, problem: str) -> None:
    if not kept:
        raise StoreUnsafe(problem)


def _known(probed: Probe | None) -> Probe:
    if probed is None:
        raise StoreUnsafe("this check could not run", "See the failed check before it")
    return probed


MAX_SKEW_S = 300.0
"""Ages are compared with graces of hours and of a week."""
_RACES = 3
_RACERS = 2  # SeaweedFS delays one of more than two by a second

_found: dict[str, bool] = {}
_probing = threading.Lock()


class Probe(NamedTuple):
    """How a store handled some small objects."""

    refuses_second: bool
    """A second create of the same key was refused and changed nothing."""
    races_won: int
    """Times that exactly one of two concurrent creates succeeded, of `_RACES`."""
    skew_s: float
    """Lower bound of the store's clock minus ours (negative: behind); 0 if they may be equal."""

    @property
    def creates_once(self) -> bool:
        """Create-only writes have exactly one winner."""
        return self.refuses_second and self.races_won == _RACES


def probe_store(store: Store, clock: Clock) -> Probe:
    """Create small objects twice, sequentially and concurrently, and delete them. Raises Unavailable."""
    _check_bucket(store)
    with _scratch(store, clock) as key:
        before = clock()
        store.put_if_absent(key, b"first\n")  # the key is new: a refusal is a success whose reply was lost
        after = clock()
        again = store.put_if_absent(key, b"second\n")
        kept = store.get(key) == b"first\n"
        written_at = next(info.modified_at for info in store.list(names.PROBES_PREFIX) if info.key == key)
    # File systems and S3 report whole seconds.
    skew_s = min(0.0, written_at + 1 - before) + max(0.0, written_at - after)
    return Probe(kept and not again, sum(_one_wins(store, clock) for _ in range(_RACES)), skew_s)


def _check_bucket(store: Store) -> None:
    """Raises NoSuchBucket. SeaweedFS creates a missing bucket with the first write, so look before it: one listing."""
    next(iter(store.list(names.PROBES_PREFIX)), None)


def creates_once(store: Store, clock: Clock) -> bool:
    """Whether create-only has one winner on this store. Probed once per process and store. Raises Unavailable."""
    if store.one_winner is not None:
        return store.one_winner
    with _probing:
        if store.identity not in _found:
            try:
                _found[store.identity] = probe_store(store, clock).creates_once
            except StoreReadOnly as error:
                # The credentials may be limited to one run.
                logger.warning(
                    "cannot check whether %s overwrites on create; assuming that it does not: %s", store.url, error
                )
                _found[store.identity] = True
        return _found[store.identity]


def check_store(store: Store, clock: Clock) -> None:
    """Return if it is safe to plan and decide deletions on this store now.

    Raises StoreUnsafe if a create overwrites, or if its clock and ours are minutes apart, or Unavailable.
    """
    probe = probe_store(store, clock)
    if not ((probe.creates_once and store.one_winner is not False) or store.remote_create):
        raise StoreUnsafe(
            f"{store.url} accepts create-only writes and overwrites",
            "Nothing was deleted. Two processes could both win a decision: delete through a daemon, whose database "
            "decides, or use a store that honours If-None-Match",
        )
    if abs(probe.skew_s) > MAX_SKEW_S:
        ahead = "ahead of" if probe.skew_s > 0 else "behind"
        raise StoreUnsafe(
            f"the clock of {store.url} is {abs(probe.skew_s):.0f} s {ahead} ours, limit: {MAX_SKEW_S:.0f} s",
            "Synchronize the clocks: until then the age of objects is unknown and nothing is deleted",
        )


def _one_wins(store: Store, clock: Clock) -> bool:
    with _scratch(store, clock) as key:
        proposals = [f"racer {number}\n".encode() for number in range(_RACERS)]
        won = in_parallel(partial(store.put_if_absent, key), proposals, _RACERS)
        kept = store.get(key)
    # After a lost reply a winner may be reported as a loser, but a reported winner must be right.
    return all(kept == proposal for proposal, first in zip(proposals, won, strict=True) if first)


@contextmanager
def _scratch(store: Store, clock: Clock) -> Iterator[str]:
    key = f"{names.PROBES_PREFIX}{new_ulid(clock())}.json"
    try:
        yield key
    finally:
        store.delete_many([key])


NUM_OBJECTS = 4
"""One after the other: a rank uploads one shard at a time."""
_LEAST_BYTES = NUM_OBJECTS * CHUNK_BYTES


class StoreSpeed(Record):
    """The bytes that one rank writes and reads in one second."""

    store: str
    write_bytes_per_s: float
    """Until the objects are durable."""
    read_bytes_per_s: float
    """As restores read. A local disk may read from the page cache."""
    num_objects: int
    num_bytes: int


def measure_store(
    store: Store, clock: Clock, num_bytes: int, progress: Callable[[int], None] = lambda _: None
) -> StoreSpeed:
    """Write objects of random bytes as shards are written, read them as restores do, compare, and remove them.

    progress: called with bytes written or read. Raises InvalidRequest for fewer bytes than a few chunks, CorruptObject
    if other bytes come back, or the store's errors.
    """
    if num_bytes < _LEAST_BYTES:
        raise InvalidRequest(f"{num_bytes} bytes are too few to measure", f"Give at least {_LEAST_BYTES >> 20} MiB")
    folder = f"{names.PROBES_PREFIX}{new_ulid(clock())}/"
    chunk = os.urandom(CHUNK_BYTES)  # a store may compress or find repeated bytes, within this bound
    chunks = -(-num_bytes // _LEAST_BYTES)
    keys = [f"{folder}object-{number}" for number in range(NUM_OBJECTS)]

    def read(place: tuple[str, int]) -> str:
        """The digest of one chunk."""
        key, at = place
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with store.open_reader(key) as reader:
            reader.read(at * CHUNK_BYTES, buffer)
        progress(CHUNK_BYTES)
        return digest(buffer)

    try:
        began = time.perf_counter()
        for key in keys:
            with store.open_writer(key, size_hint=chunks * CHUNK_BYTES) as writer:
                for _ in range(chunks):
                    writer.write(chunk)
                    progress(CHUNK_BYTES)
        written_s = time.perf_counter() - began
        began = time.perf_counter()
        found = in_parallel(read, product(keys, range(chunks)), store.parallel_reads)
        read_s = time.perf_counter() - began
    finally:
        store.delete_many([info.key for info in store.list(folder)])
    if set(found) != {digest(chunk)}:
        raise CorruptObject(f"{store.url} returned other bytes than were written", "Run ckptctl probe")
    total = NUM_OBJECTS * chunks * CHUNK_BYTES
    return StoreSpeed(
        store=store.url,
        write_bytes_per_s=total / written_s,
        read_bytes_per_s=total / read_s,
        num_objects=NUM_OBJECTS,
        num_bytes=total,
    )
