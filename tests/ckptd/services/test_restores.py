"""Restore sessions without a process around them: leases, races, lost replies, and time that passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ckptapi.bodies import Phase, RankBody, RankReport, RestoreRequest, RestoreState
from ckptd.index import Database, Index, Restore, RestoreIndex
from ckptd.index.listing import Listing
from ckptd.metrics import Metrics
from ckptd.services import restores as module
from ckptd.services.catalog import Catalog, Freshness
from ckptd.services.restores import RestoreLeases, Restores
from ckptd.services.store_sync import StoreSync
from ckptd.services.tokens import ANONYMOUS
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.commits.leases import active_leases
from ckptstore.errors import CheckpointHeld, NoCheckpoint, NotFound, StoreUnavailable, TooManyRequests
from ckptstore.names import Attempt, RunKeys
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import Store
from ckptstore.stores.checks import MAX_SKEW_S
from tests.support.checkpoints import RUN, count_calls, intact, keys, write
from tests.support.stores import Faults, FaultyStore, Interleaving, MovableClock, race
from tests.support.waiting import present

_DAY_S = 24 * 3600.0
_FETCHING = RankReport(phase=Phase.FETCHING)
_RESTORED = RankReport(phase=Phase.RESTORED)
Make = Callable[..., "Services"]


class Services:
    """What a daemon has of them; several may share a database."""

    def __init__(
        self, store: Store, restoring: Store | None = None, *, database: Database, clock: MovableClock
    ) -> None:
        """restoring: what restores use instead of the store."""
        self.ended: list[str] = []
        self.index = RestoreIndex(database)
        index, freshness, metrics = Index(database), Freshness(clock, 60), Metrics()
        StoreSync(store, index, freshness, metrics, clock).run_once()
        restoring = restoring or store
        self.leases = RestoreLeases(restoring, self.index, metrics, clock, self.ended.append)
        catalog = Catalog(index, Listing(database), freshness, store.url)
        self.restores = Restores(restoring, catalog, self.index, self.leases, clock, self.ended.append)

    def open(self, key: str = "k", checkpoint: Checkpoint | None = None, world_size: int = 2) -> Restore:
        """The first rank of a job joins."""
        id = checkpoint.id if checkpoint else None
        asked = RestoreRequest(run=RUN, key=key, world_size=world_size, rank=0, checkpoint=id, ttl_s=100)
        return self.restores.open(asked, ANONYMOUS.name, ANONYMOUS.check_owner)[0]


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def make(database: Database, clock: MovableClock) -> Make:
    return partial(Services, database=database, clock=clock)


@pytest.fixture
def services(store: Store, make: Make) -> Services:
    """Over one checkpoint, of step 1."""
    write(store, 1)
    return make(store)


def _holders(store: Store, clock: MovableClock) -> list[str]:
    return [holder for holders in active_leases(Run(store, RUN, clock)).values() for holder in holders]


_ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"
_BEGAN = 1000.0


def _restore(world_size: int = 4, ttl_s: float = 100) -> Restore:
    checkpoint = Checkpoint("gpt", Attempt(10, _ULID), State.COMMITTED)
    return Restore(
        id=_ULID, run="gpt", key="job-1", checkpoint=checkpoint, by="trainer", world_size=world_size, ttl_s=ttl_s,
        created_at=_BEGAN, lease=None, lease_until=0,
    )  # fmt: skip


def _fetching(rank: int, done: int, reported_at: float = _BEGAN) -> RankBody:
    return RankBody(rank, Phase.FETCHING, done, 100, reported_at)


def _restored(rank: int, reported_at: float = _BEGAN) -> RankBody:
    return RankBody(rank, Phase.RESTORED, 100, 100, reported_at)


_REPORTS = st.builds(
    RankReport, phase=st.sampled_from([phase for phase in Phase if phase is not Phase.FAILED]),
    done_bytes=st.integers(0, 1000), total_bytes=st.integers(0, 1000),
)  # fmt: skip


def test_the_lease_lasts_as_long_as_the_session(store: Store, clock: MovableClock, make: Make) -> None:
    run = Run(store, RUN, clock)
    old, _ = write(store, 1, 2)
    services = make(store)
    id = services.open(checkpoint=old).id
    for _ in range(40):
        clock.advance(50)
        services.restores.report(id, 0, _FETCHING)
        services.restores.report(id, 1, _FETCHING)
        services.restores.watch()
        services.leases.run_once()
        assert _holders(store, clock) == [f"restore {id}"]
        with pytest.raises(CheckpointHeld):
            delete_checkpoint(run, old.attempt, "test")
    services.restores.report(id, 0, _RESTORED)
    services.restores.report(id, 1, _RESTORED)
    services.leases.run_once()
    assert (_holders(store, clock), services.ended) == ([], [id])
    delete_checkpoint(run, old.attempt, "test")


def test_a_lease_has_the_name_of_its_session_and_is_written_when_it_needs_to_be(store: Store, make: Make) -> None:
    write(store, 1)
    counting = Faults()
    services = make(store, FaultyStore(store, counting))
    restore = services.open()
    assert keys(store, RunKeys(RUN).leases) == [f"{RunKeys(RUN).leases}{restore.lease}.json"]
    counting.calls.clear()
    for _ in range(10):
        services.leases.run_once()
    assert counting.calls == []


def test_without_a_daemon_the_lease_runs_out_by_itself(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 1)
    make(store).open()
    clock.advance(640 + MAX_SKEW_S)
    assert len(_holders(store, clock)) == 1
    clock.advance(61)
    assert _holders(store, clock) == []


def test_a_daemon_that_was_away_does_not_blame_the_ranks(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 1)
    id = make(store).open().id
    clock.advance(500)
    back = make(store)
    back.restores.watch()
    expires_at = present(back.restores.view(id, with_ranks=True).expires_at)
    assert 0 < expires_at - clock() <= 100
    back.restores.report(id, 0, _FETCHING)
    clock.advance(101)
    back.restores.watch()
    ended = back.restores.find(id)
    assert (ended.state, back.ended) == (RestoreState.EXPIRED, [id])
    assert ended.problem == "no report for 100 s from rank 0 (fetching), rank 1 (never joined)"


def test_a_rank_that_never_joins_ends_it_although_others_report(services: Services, clock: MovableClock) -> None:
    id = services.open(world_size=3).id
    for _ in range(3):
        clock.advance(25)
        services.restores.report(id, 0, _FETCHING)
        services.restores.report(id, 2, _RESTORED)
        services.restores.watch()
        assert services.restores.find(id).live
    clock.advance(26)
    services.restores.watch()
    assert services.restores.find(id).problem == "no report for 100 s from rank 1 (never joined)"


def test_a_rank_that_is_restored_may_be_silent(services: Services, clock: MovableClock) -> None:
    id = services.open().id
    services.restores.report(id, 1, _RESTORED)
    for _ in range(4):
        clock.advance(60)
        services.restores.report(id, 0, _FETCHING)
        services.restores.watch()
        expires_at = present(services.restores.view(id, with_ranks=False).expires_at)
        assert 0 < expires_at - clock() <= 100


def test_a_lease_that_ran_out_meanwhile_is_taken_again(store: Store, clock: MovableClock, make: Make) -> None:
    old, _ = write(store, 1, 2)
    id = make(store).open(checkpoint=old).id
    clock.advance(800)  # the session's lease is over; the store keeps it for five more minutes
    back = make(store)
    back.leases.run_once()
    assert (set(_holders(store, clock)), len(keys(store, f"{RUN}/leases/"))) == ({f"restore {id}"}, 2)
    assert back.restores.find(id).live


def test_a_checkpoint_deleted_meanwhile_ends_the_session(store: Store, clock: MovableClock, make: Make) -> None:
    old, _ = write(store, 1, 2)
    id = make(store).open(checkpoint=old).id
    clock.advance(1000)
    delete_checkpoint(Run(store, RUN, clock), old.attempt, "test")
    back = make(store)
    back.leases.run_once()
    ended = back.restores.find(id)
    assert (ended.state, back.ended) == (RestoreState.FAILED, [id])
    assert f"{old.id} is being deleted" in ended.problem


def test_a_session_that_ends_in_a_renewal_leaves_no_lease(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 1)
    services = make(store)
    id = services.open().id
    clock.advance(400)
    cancelling = Interleaving(0, lambda: services.restores.cancel(id))
    make(store, FaultyStore(store, cancelling)).leases.run_once()
    assert cancelling.calls[0].startswith(f"put {RUN}/leases/")
    assert _holders(store, clock) == []


def test_two_daemons_begin_one_session(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 1)
    daemons = [make(store) for _ in range(4)]
    for attempt in range(5):
        opened = race(*[partial(services.open, f"k{attempt}") for services in daemons])
        assert [type(restore) for restore in opened] == [Restore] * 4
        assert len({restore.id for restore in opened if isinstance(restore, Restore)}) == 1
        assert len(_holders(store, clock)) == attempt + 1


def test_a_join_survives_every_failure_of_the_store(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 1)
    calls = count_calls(store, lambda counted: make(store, counted).open("count"))
    assert calls > 3
    services = make(store)
    for number in range(calls):
        for mode in ("before", "after"):
            key = f"{mode}-{number}"
            failing = make(store, FaultyStore(store, Faults(number, mode)))
            with pytest.raises(StoreUnavailable):
                failing.open(key)
            assert services.index.find_key(RUN, key) is None
            session = services.open(key)
            assert (session.key, session.num_joined, session.live) == (key, 1, True)


def test_a_deletion_in_between_never_takes_what_is_restored(store: Store, clock: MovableClock, make: Make) -> None:
    """The older checkpoint is asked for by name, and another process deletes it at every moment of the join."""
    write(store, 9)
    calls = count_calls(store, lambda counted: make(store, counted).open("count"))
    outcomes = []
    for number in range(calls + 1):
        (old,) = write(store, number)
        interleaving = Interleaving(number, partial(_delete, store, old, clock))
        services = make(store, FaultyStore(store, interleaving))
        try:
            services.open(f"k{number}", old)
        except NoCheckpoint:
            outcomes.append("refused")
        else:
            outcomes.append("restoring")
            assert intact(store, old)
    assert set(outcomes) == {"refused", "restoring"}


def test_a_newest_deleted_in_between_gives_way_to_the_one_before(store: Store, clock: MovableClock, make: Make) -> None:
    write(store, 0)
    for number in range(count_calls(store, lambda counted: make(store, counted).open("count")) + 1):
        (newest,) = write(store, number + 1)
        services = make(store, FaultyStore(store, Interleaving(number, partial(_delete, store, newest, clock))))
        assert intact(store, services.open(f"k{number}").checkpoint)


def _delete(store: Store, checkpoint: Checkpoint, clock: MovableClock) -> None:
    with contextlib.suppress(CheckpointHeld):
        delete_checkpoint(Run(store, RUN, clock), checkpoint.attempt, "test", force=True)


def test_ended_sessions_are_forgotten_after_a_day(services: Services, clock: MovableClock) -> None:
    ended, live = services.open("a").id, services.open("b").id
    services.restores.cancel(ended)
    clock.advance(_DAY_S - 60)
    services.restores.forget()
    assert services.restores.find(ended).state is RestoreState.CANCELLED
    clock.advance(120)
    services.restores.forget()
    with pytest.raises(NotFound):
        services.restores.find(ended)
    assert services.restores.find(live).live
    assert services.open("a").id != ended


def test_only_so_many_ended_sessions_are_kept(services: Services, clock: MovableClock) -> None:
    ids = []
    for number in range(5):
        ids.append(services.open(f"k{number}").id)
        services.restores.report(ids[-1], 1, _FETCHING)
        clock.advance(1)
        services.restores.cancel(ids[-1])
    live = services.open("live").id
    services.index.forget(0, keep=2)
    assert [restore.id for restore in services.index.newest(RUN, 10)] == [live, ids[4], ids[3]]
    assert services.index.ranks(ids[0]) == []


def test_sessions_are_bounded(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LIVE", 2)
    first = services.open("a")
    services.open("b")
    with pytest.raises(TooManyRequests):
        services.open("c")
    services.restores.cancel(first.id)
    services.open("c")


def test_sessions_belong_to_one_store(store: Store, clock: MovableClock, make: Make, database: Database) -> None:
    write(store, 1)
    Index(database).adopt(store.url, clock())
    services = make(store)
    id = services.open().id
    Index(database).adopt(store.url, clock())
    assert services.restores.find(id).live
    Index(database).adopt("file:///elsewhere", clock())
    with pytest.raises(NotFound):
        services.restores.find(id)


def test_the_last_rank_to_be_restored_ends_the_session_and_a_failed_one_too() -> None:
    """A report that is repeated or late does not undo that a rank is restored."""
    restored = RankReport(phase=Phase.RESTORED, done_bytes=7)
    restore, said = module.advance(_restore(2), None, 0, restored, 1001)
    assert said is not None
    assert (restore.state, restore.num_joined, restore.num_restored) == (RestoreState.RESTORING, 1, 1)
    for report in (restored, RankReport(phase=Phase.FETCHING, done_bytes=5)):
        again, same = module.advance(restore, said, 0, report, 1002)
        assert (again.num_restored, again.done_bytes, same) == (1, 7, replace(said, updated_at=1002))
    ended, _ = module.advance(restore, None, 1, restored, 1003)
    assert (ended.state, ended.ended_at, ended.problem) == (RestoreState.RESTORED, 1003, "")
    failed, _ = module.advance(restore, said, 0, RankReport(phase=Phase.FAILED, problem="out of memory"), 1002)
    assert (failed.state, failed.num_restored) == (RestoreState.FAILED, 0)
    assert failed.problem == "rank 0 failed: out of memory"


@pytest.mark.parametrize("state", [state for state in RestoreState if state is not RestoreState.RESTORING])
def test_what_has_ended_never_changes(state: RestoreState) -> None:
    ended, before = replace(_restore(1), state=state, ended_at=1001), _fetching(0, 50)
    for phase in Phase:
        assert module.advance(ended, before, 0, RankReport(phase=phase), 1002) == (ended, before)
    assert module.add_rank(ended, None, 0, 1002) == (ended, None)


def test_a_long_problem_is_cut_and_a_missing_one_named() -> None:
    long = RankReport(phase=Phase.FAILED, problem="x\0" * 5000)
    restore, said = module.advance(_restore(), None, 3, long, 1001)
    assert said is not None
    assert (len(said.problem), "\0" in said.problem, len(restore.problem) < 1100) == (1000, False, True)
    restore, _ = module.advance(_restore(), None, 3, RankReport(phase=Phase.FAILED), 1001)
    assert restore.problem == "rank 3 failed: it gave no reason"


@given(st.lists(st.tuples(st.integers(0, 3), _REPORTS), max_size=40))
def test_sums_are_those_of_the_ranks(reports: list[tuple[int, RankReport]]) -> None:
    restore, ranks = _restore(4), dict[int, RankBody]()
    for now, (rank, report) in enumerate(reports):
        restore, said = module.advance(restore, ranks.get(rank), rank, report, float(now))
        assert said is not None or not restore.live
        if said is not None:
            ranks[rank] = said
    restored = [said for said in ranks.values() if said.phase is Phase.RESTORED]
    assert (restore.num_joined, restore.num_restored) == (len(ranks), len(restored))
    assert restore.done_bytes == sum(said.done_bytes for said in ranks.values())
    assert restore.total_bytes == sum(said.total_bytes for said in ranks.values())
    assert (restore.state is RestoreState.RESTORED) == (len(restored) == 4)


_SOME = [_fetching(0, 80), _fetching(1, 39), _fetching(2, 41), _fetching(3, 80), _fetching(4, 90)]
_SILENT = [_fetching(0, 50, reported_at=_BEGAN + 30), _fetching(1, 50, reported_at=_BEGAN + 4)]
_MOST = [_restored(0), _fetching(2, 60), _restored(3)]


@pytest.mark.parametrize(
    ("world_size", "ranks", "after_s", "behind"),
    [
        (5, _SOME, 0, [1]),  # below half of the median
        (2, [], 0, []), (2, [RankBody(0, Phase.PLANNING, 0, 0, _BEGAN)], 0, []),  # no rank has begun
        (2, _SILENT, 29, []), (2, _SILENT, 30, [1]), (2, [_restored(0), _SILENT[1]], 30, [1]),  # for a quarter
        (5, _MOST, 0, [1, 4]), (2, _MOST[:1], 0, [1]),  # never joined, and most have done something
        (6, _MOST[:2], 0, []), (6, _MOST[:2], 26, [1, 2, 3, 4, 5]),
    ],
)  # fmt: skip
def test_ranks_that_are_slow_silent_or_absent_are_behind(
    world_size: int, ranks: list[RankBody], after_s: float, behind: list[int]
) -> None:
    assert module.stragglers(_restore(world_size), ranks, _BEGAN + after_s) == behind


def test_as_many_are_named_as_a_page_shows() -> None:
    assert module.slowest(_SOME) == _SOME[1]
    assert len(module.stragglers(_restore(1 << 20), _MOST, _BEGAN + 26)) == module.MAX_STRAGGLERS


def test_ended_sessions_have_no_stragglers() -> None:
    ended = replace(_restore(2), state=RestoreState.FAILED)
    assert module.stragglers(ended, [_fetching(0, 90)], _BEGAN + 1000) == []


def test_silence_names_some_ranks_and_where_they_were() -> None:
    ranks = [_restored(0), _fetching(1, 50, reported_at=_BEGAN + 1), _fetching(2, 60, reported_at=_BEGAN + 60)]
    restore = _restore(4)
    assert module.silence(restore, ranks, _BEGAN + 99, since=0) == ""
    said = module.silence(restore, ranks, _BEGAN + 101, since=0)
    assert said == "no report for 100 s from rank 1 (fetching), rank 3 (never joined)"
    assert module.silence(restore, ranks, _BEGAN + 101, since=_BEGAN + 2) == ""
    said = module.silence(_restore(1 << 20), [], _BEGAN + 100, since=0)
    assert said.count("(never joined)") == 16
    assert said.endswith(f" and {(1 << 20) - 16} more")


def test_progress_is_a_mean_over_all_ranks() -> None:
    ranks = [_restored(0), _fetching(1, 50), RankBody(2, Phase.FETCHING, 500, 100, _BEGAN)]
    assert module.mean(_restore(5), ranks) == pytest.approx(0.5)
