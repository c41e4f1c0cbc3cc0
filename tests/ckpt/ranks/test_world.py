"""Ranks meet through the store of their process group, and name the one that does not come."""

from __future__ import annotations

import os
import threading
import warnings
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.ranks.world import World, absent, call_with_timeout
from tests.support.parallel.runner import Outcome, Scenario, run_scenarios
from tests.support.waiting import wait_until

_TIMEOUT_S = 3.0
_ROUNDS = 3
_STORES = ("file", "tcp")
_LOST = [
    *product(_STORES, ("SIGKILL", "SIGSTOP"), (0, 2), ("gather",)),
    ("file", "SIGKILL", 0, "broadcast"),
    ("tcp", "SIGSTOP", 0, "broadcast"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[object, Outcome]:
    """All at the same time: most of it is waiting."""
    scenarios: dict[object, Scenario] = {}
    for store in _STORES:
        tcp = store == "tcp"
        scenarios["meet", store] = Scenario("tests.ckpt.ranks.meetings:meet", 3, {"rounds": _ROUNDS}, tcp=tcp)
        scenarios["twice", store] = Scenario("tests.ckpt.ranks.meetings:live_twice", 3, tcp=tcp)
        scenarios["slow", store] = Scenario("tests.ckpt.ranks.meetings:be_slow", 3, {"timeout_s": _TIMEOUT_S}, tcp=tcp)
    scenarios["late"] = Scenario("tests.ckpt.ranks.meetings:come_late", 3, {"notice_s": 0.2}, tcp=True)
    for case in _LOST:
        store, how, lost, meeting = case
        arguments = {"lost": lost, "how": how, "meeting": meeting, "timeout_s": _TIMEOUT_S}
        scenarios[case] = Scenario("tests.ckpt.ranks.meetings:lose", 3, arguments, lost=(lost,), tcp=store == "tcp")
    found = run_scenarios(list(scenarios.values()), tmp_path_factory.mktemp("world"), together=True)
    return dict(zip(scenarios, found, strict=True))


@pytest.mark.parametrize("store", _STORES)
def test_every_rank_receives_all_values_in_one_world_after_another(outcomes: dict[object, Outcome], store: str) -> None:
    results = outcomes["meet", store].result()
    expected: list[object] = []
    for number in [*range(_ROUNDS), *range(_ROUNDS)]:
        expected += [[[number, rank, b"\x00\xff", None] for rank in range(3)], {"from": 0, "number": number}]
    for result in results:
        assert result["heard"] == repr(expected)


@pytest.mark.parametrize("store", _STORES)
def test_values_of_an_earlier_life_of_the_job_are_not_read(outcomes: dict[object, Outcome], store: str) -> None:
    lives = [[[name, rank] for rank in range(3)] for name in ("first", "second")]
    assert outcomes["twice", store].result() == [lives] * 3


@pytest.mark.parametrize("store", _STORES)
def test_meetings_leave_nothing_but_the_last_answer(outcomes: dict[object, Outcome], store: str) -> None:
    last = str(4 * _ROUNDS + 1)
    assert [result["left"] for result in outcomes["meet", store].result()] == [[last]] * 3


@pytest.mark.parametrize(("store", "how", "lost", "meeting"), _LOST)
def test_a_rank_that_is_lost_is_named_in_time(
    outcomes: dict[object, Outcome], store: str, how: str, lost: int, meeting: str
) -> None:
    results = outcomes[store, how, lost, meeting].result()
    for result in (result for rank, result in enumerate(results) if rank != lost):
        # With rank 0 its store is gone as well, and the rank that hosts it is named.
        assert f"rank {lost}" in result["said"]


@pytest.mark.parametrize("store", _STORES)
def test_a_slow_rank_that_gives_signs_of_life_is_waited_for(outcomes: dict[object, Outcome], store: str) -> None:
    assert outcomes["slow", store].result() == [[0, 1, 2]] * 3


def test_a_rank_that_waits_long_logs_once_for_which(outcomes: dict[object, Outcome]) -> None:
    logged = outcomes["late"].result()[0]
    assert logged == ["rank 0 has waited 0 s for ranks 1, 2 of 3; all ranks must make the same calls of ckpt"]


@given(st.sets(st.integers(0, 299), max_size=40))
def test_ranks_that_have_not_come_are_found_in_few_requests(missing: set[int]) -> None:
    requests = []

    def exist(*keys: str) -> bool:
        requests.append(keys)
        return missing.isdisjoint(map(int, keys))

    assert absent(exist, [str(rank) for rank in range(300)]) == sorted(missing)[:8]
    assert len(requests) <= 1 + 2 * 9 * min(8, len(missing))


def test_one_process_is_a_world_of_its_own() -> None:
    world = World(1.0)
    assert (world.rank, world.size) == (0, 1)
    assert world.gather("a") == ["a"]
    assert world.broadcast("b") == "b"
    world.beat()


_LONG_S = 60.0


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpt-meeting"]


def _fail() -> None:
    raise KeyError("lost")


def test_a_thread_is_used_again_and_ends_when_it_is_idle() -> None:
    first = call_with_timeout(_LONG_S, threading.get_ident)
    with pytest.raises(KeyError, match="lost"):
        call_with_timeout(_LONG_S, _fail)
    assert call_with_timeout(_LONG_S, threading.get_ident) == first != threading.get_ident()
    wait_until(lambda: not _threads(), "the end of idle threads")


def test_a_call_that_hangs_delays_no_other_and_its_thread_ends_after_it() -> None:
    end = threading.Event()
    with pytest.raises(TimeoutError):
        call_with_timeout(0.01, end.wait)
    assert call_with_timeout(_LONG_S, int, "7") == 7
    end.set()
    wait_until(lambda: not _threads(), "the end of idle threads")


def test_threads_of_a_parent_are_not_used_by_its_child() -> None:
    call_with_timeout(_LONG_S, int, "7")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads
        child = os.fork()
    if not child:
        status = 1
        try:
            status = 0 if call_with_timeout(_LONG_S, int, "7") == 7 else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
