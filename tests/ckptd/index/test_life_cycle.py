"""The whole life of checkpoints, as two daemons see it that share an index and look at the store now and then.

CKPTD_LIFE_CYCLES says how many lives are tried on each database; a few by default.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test

from ckptapi.listing import Filter, Sort
from ckptd.index import Database, Index, Listing
from ckptd.metrics import Metrics
from ckptd.services.catalog import Catalog, Freshness
from ckptd.services.store_sync import IDLE_AFTER_S, IDLE_ROUNDS, StoreSync
from ckptstore.commits.catalog import Checkpoint, State, list_checkpoints
from ckptstore.errors import CkptError, InvalidRequest, NoCheckpoint, StoreUnavailable
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, Reference
from ckptstore.run import Run
from ckptstore.stores import Store
from tests.conftest import on_both
from tests.support.checkpoints import write_checkpoint
from tests.support.life_cycle import HOUR_S, RUN, LifeCycle, graces, lives, pick
from tests.support.stores import FakeClock, FaultyStore, Interleaving

OTHER = "other"
"""A run in which nothing happens: a store that lists no run at all is not believed."""
NEVER = -1
acts = st.sampled_from(["save", "reference", "prune", "delete", "undelete", "collect", "damage", "fail"])
moments = st.integers(0, 8)


class Daemon:
    """The services of a daemon that say which checkpoints there are, from their start."""

    def __init__(self, store: Store, database: Database, clock: FakeClock) -> None:
        self.index = Index(database)
        self.interleaving = Interleaving(NEVER, lambda: None)
        freshness = Freshness(clock, 60)
        self.catalog = Catalog(self.index, Listing(database), freshness, store.url)
        view = FaultyStore(store, self.interleaving)
        self.store_sync = StoreSync(view, self.index, freshness, Metrics(), clock)
        self._clock = clock
        self._seen = (NEVER, 0.0)

    def run_once(self) -> bool:
        """One look at the store. Whether it had to show everything: runs that are idle may come later."""
        version = self.index.version(RUN)
        if version != self._seen[0]:
            self._seen = (version, self._clock())
        self.store_sync.run_once()
        return self._clock() - self._seen[1] < IDLE_AFTER_S

    def disturbed(self, at: int, act: Callable[[], object], work: Callable[[], object]) -> None:
        """Do some work, while another process acts just before its call to the store numbered `at`."""
        pending = [act]
        self.interleaving.calls.clear()
        self.interleaving.at = at
        # Calls from several threads may get one number.
        self.interleaving.act = lambda: [pending.pop()() for _ in pending[:]]
        with suppress(CkptError):
            work()
        self.interleaving.at = NEVER

    def listed(self, run: str = RUN) -> list[Checkpoint]:
        """Of a run, page by page."""
        page = self.catalog.page(Filter(run=run), Sort.RUN, None, 2)
        found = page.checkpoints
        while page.next is not None:
            page = self.catalog.page(Filter(run=run), Sort.RUN, page.next, 2)
            found += page.checkpoints
        return found


class IndexLifeCycle(LifeCycle):
    """One run on one store, all its processes, and two daemons."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.index = Index(database)
        self.other = write_checkpoint(self.store, OTHER, arrays={}, clock=self.clock)
        self.clock.now += 1
        for step in (1, 2, 2, 3):
            self.save(step=step, loss=step / 4)
        self.lose()

    def lose(self) -> None:
        """The index is deleted, and the daemons start."""
        self.index.drop_runs(self.index.versions())
        self.daemons = [Daemon(self.store, self.database, self.clock) for _ in range(2)]

    def indexed(self) -> list[Checkpoint]:
        """What stands in the index, whether or not a daemon would believe it."""
        return Listing(self.database).page(Filter(run=RUN), Sort.RUN, None, 1000).checkpoints

    def act(self, what: str, number: int, grace_s: float) -> None:
        """What others do while a daemon is looking."""
        if what == "save":
            self.save(step=number % 13, loss=0.5)
        elif what == "reference":
            self.reference(number=number, step=number % 13, loss=0.5, fault=None)
        elif what == "prune":
            self.prune(policy=Policy(keep_last=1), grace_s=grace_s, fault=None)
        elif what == "delete":
            self.delete(number=number, grace_s=grace_s, fault=None)
        elif what == "undelete":
            self.undelete(number=number, fault=None)
        elif what == "collect":
            self.collect(fault=None)
        elif what == "damage":
            self.flip(number=number, at=-(number % 2))
            self.scrub(number=number)
        else:
            raise StoreUnavailable("injected, nothing happened")

    # Daemons.

    @rule(which=st.integers(0, 1))
    def look(self, which: int) -> None:
        daemon = self.daemons[which]
        if not daemon.run_once():
            for _ in range(IDLE_ROUNDS - 1):
                daemon.run_once()
        self.compare(daemon)

    @rule(which=st.integers(0, 1), hours=st.sampled_from([-30, -1, 1, 30]))
    def look_with_a_wrong_clock(self, which: int, hours: float) -> None:
        self.clock.jump_s = hours * HOUR_S
        self.look(which)
        self.clock.jump_s = 0.0

    @rule(
        which=st.integers(0, 1), at=moments, what=acts, number=pick, grace_s=graces, shared=st.booleans(),
        how=st.sampled_from(["round", "sync", "notify", "reindex"]),
    )  # fmt: skip
    def look_meanwhile(
        self, which: int, at: int, what: str, number: int, grace_s: float, shared: bool, how: str
    ) -> None:
        """Something happens, and the other daemon may learn of it, in the middle of a look."""
        daemon, other = self.daemons[which], self.daemons[1 - which]
        attempt = self.some(number, "visible", "hidden", "gone")
        versions: list[int] = []

        def happen() -> None:
            self.act(what, number, grace_s)
            if shared:
                versions.append(self.index.version(RUN))
                other.store_sync.sync_run(RUN)
                versions.append(self.index.version(RUN))

        work: dict[str, Callable[[], Any]] = {
            "round": daemon.run_once,
            "sync": lambda: daemon.store_sync.sync_run(RUN),
            "notify": lambda: attempt and daemon.store_sync.notify(RUN, attempt),
            "reindex": daemon.store_sync.reindex,
        }
        daemon.disturbed(at, happen, work[how])
        if len(set(versions)) == 2:
            # What the other one wrote is newer than anything that was read before.
            assert _by_attempt(self.indexed()) == _by_attempt(list_checkpoints(Run(self.store, RUN)))
        self.look(number % 2)

    @rule(which=st.integers(0, 1), number=pick)
    def notify(self, which: int, number: int) -> None:
        attempt = self.some(number, "visible", "hidden", "gone")
        if attempt is None:
            return
        try:
            found = self.daemons[which].store_sync.notify(RUN, attempt)
        except NoCheckpoint:
            assert self.lives[attempt].state != "visible"
        else:
            assert self.lives[attempt].state == "visible"
            assert (found.state is State.CORRUPT) == self.lives[attempt].quarantined
            assert self.daemons[which].index.find(Reference(RUN, attempt.step, attempt.ulid)) is not None

    @rule(which=st.integers(0, 1))
    def restart(self, which: int) -> None:
        self.daemons[which] = Daemon(self.store, self.database, self.clock)

    @rule(which=st.integers(0, 1), lost=st.booleans())
    def reindex(self, which: int, lost: bool) -> None:
        daemon = self.daemons[which]
        if lost:
            self.lose()
            daemon = self.daemons[which]
            with pytest.raises(StoreUnavailable):
                daemon.catalog.latest(RUN)
        daemon.store_sync.reindex()
        self.compare(daemon)

    # What must be true.

    def compare(self, daemon: Daemon) -> None:
        """A daemon that has looked just now says what the store says."""
        stored = list_checkpoints(Run(self.store, RUN))
        daemon.catalog.follow()
        assert _by_attempt(daemon.listed()) == _by_attempt(stored)
        branches = {c.attempt: (c.abandoned_at, c.parent) for c in stored}
        assert {c.attempt: (c.abandoned_at, c.parent) for c in daemon.listed()} == branches
        assert daemon.listed(OTHER) == [self.other]
        newest = next((c for c in stored if c.state is State.COMMITTED), None)
        assert _or_none(lambda: daemon.catalog.latest(RUN)) == newest
        if newest is None:
            assert daemon.catalog.latest(None) == self.other
        else:
            with pytest.raises(InvalidRequest, match=f"has several: {RUN}, {OTHER}"):
                daemon.catalog.latest(None)
        for attempt, life in self.lives.items():
            reference = Reference(RUN, attempt.step, attempt.ulid)
            found = _or_none(partial(daemon.catalog.find, reference))
            assert (found is not None) == (life.state == "visible"), f"{attempt} is {life.state}"
        for step in {attempt.step for attempt in self.lives}:
            usable = [
                c for c in stored if c.step == step and c.state in (State.COMMITTED, State.THINNED, State.ABANDONED)
            ]
            best = min(usable, key=lambda c: c.state is State.ABANDONED, default=None)
            assert _or_none(partial(daemon.catalog.find, Reference(RUN, step))) == best
        for summary in daemon.catalog.runs():
            if summary.run == RUN:
                assert (summary.num_checkpoints, summary.latest) == (len(stored), newest)
                assert summary.stored_bytes == sum(c.stored_bytes for c in stored)

    @invariant()
    def nothing_is_made_up(self) -> None:
        """However old an index is."""
        assert {checkpoint.attempt for checkpoint in self.indexed()} <= self.lives.keys()

    def teardown(self) -> None:
        """What was swept is gone from the index as well."""
        super().teardown()
        for which in range(2):
            self.look(which)


def _by_attempt(checkpoints: list[Checkpoint]) -> dict[Attempt, Checkpoint]:
    return {checkpoint.attempt: checkpoint for checkpoint in checkpoints}


def _or_none(ask: Callable[[], Checkpoint]) -> Checkpoint | None:
    try:
        return ask()
    except NoCheckpoint:
        return None


@on_both
def test_the_index_equals_the_store(database: Database) -> None:
    class OnThisDatabase(IndexLifeCycle):
        def __init__(self) -> None:
            super().__init__(database)

    run_state_machine_as_test(OnThisDatabase, settings=lives(6))
