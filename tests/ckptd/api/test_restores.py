from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier
from uuid import uuid4

import httpx
import pytest

from ckptapi import bodies
from ckptapi.bodies import Phase, RestoreState
from ckptapi.client import DaemonClient
from ckptstore import names
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import (
    Conflict,
    CorruptObject,
    DaemonUnavailable,
    InvalidRequest,
    NoCheckpoint,
    NotFound,
    StoreUnavailable,
)
from ckptstore.format.records import Policy
from ckptstore.names import RunKeys
from ckptstore.retention.pruning import Prune
from ckptstore.stores import Store, open_store
from tests.support.checkpoints import SMALL, steps, write_checkpoint
from tests.support.daemons import Daemon, join, running_daemon
from tests.support.ports import free_port
from tests.support.waiting import wait_until

_GOOD_ULID = "01M7Y6P7WGCXV53EY39EPJ6JT8"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of all tests here, each with a run of its own."""
    return open_store(str(tmp_path_factory.mktemp("restores") / "store"))


@pytest.fixture(scope="module")
def daemon(store: Store) -> Iterator[Daemon]:
    write_checkpoint(store, "other", 1, SMALL)
    with running_daemon(store.url) as daemon:
        yield daemon


@pytest.fixture
def run() -> str:
    return f"run-{uuid4().hex}"


def _write(store: Store, run: str, *steps: int) -> list[Checkpoint]:
    return [write_checkpoint(store, run, step, SMALL) for step in steps]


def _leases(store: Store, run: str) -> int:
    return len(list(store.list(RunKeys(run).leases)))


@contextmanager
def _waiting(daemon: Daemon, id: str, count: int = 1) -> Iterator[list[Future[bodies.RestoreBody]]]:
    """Long polls that the daemon is serving, each on a connection of its own."""

    def wait() -> bodies.RestoreBody:
        with daemon.client() as own:
            return own.restore_session(id, wait_s=55, ranks=False)

    before = daemon.waiting_requests()
    with ThreadPoolExecutor(count) as pool:
        polls = [pool.submit(wait) for _ in range(count)]
        wait_until(lambda: daemon.waiting_requests() >= before + count, "the polls")
        yield polls


def test_all_ranks_get_the_same_checkpoint_and_one_lease(store: Store, daemon: Daemon, run: str) -> None:
    newest, barrier = _write(store, run, 10, 20)[1], Barrier(24)

    def join_over_http(rank: int) -> httpx.Response:
        body = {"run": run, "key": "job-1", "world_size": 24, "rank": rank, "ttl_s": 60}
        barrier.wait()
        return daemon.post(bodies.RESTORES, body)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(join_over_http, range(24)))
    assert sorted(answer.status_code for answer in answers) == [200] * 23 + [201]
    assert {(answer.json()["id"], answer.json()["checkpoint"]["id"]) for answer in answers} == {
        (answers[0].json()["id"], newest.id)
    }
    assert _leases(store, run) == 1
    with daemon.client() as client:
        session = client.restore_session(answers[0].json()["id"])
    assert (session.num_joined, session.state, session.key) == (24, RestoreState.RESTORING, "job-1")
    assert session.ranks is not None
    assert [rank.rank for rank in session.ranks] == list(range(24))


def test_a_session_has_the_host_of_its_first_rank(store: Store, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    hosts = [join(client, run, "k", 3, rank, host=f"node-{rank}").host for rank in (2, 1, 0, 1)]
    assert hosts == ["node-2", "node-2", "node-0", "node-0"]
    assert join(client, run, "old-client", 1, 0).host == ""


def test_a_join_that_is_repeated_changes_nothing(store: Store, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    first = join(client, run, "k", 2, 0)
    client.report_restore(first.id, 0, Phase.FETCHING, 5, 10)
    newer, again = _write(store, run, 2)[0], join(client, run, "k", 2, 0)
    assert (again.id, again.num_joined, again.done_bytes) == (first.id, 1, 5)
    assert again.checkpoint == first.checkpoint
    assert join(client, run, "k2", 2, 0).checkpoint.id == newer.id


def test_what_cannot_be_restored_is_passed_over(store: Store, client: DaemonClient, run: str) -> None:
    _, superseded, usable, corrupt, hidden = _write(store, run, 1, 2, 2, 3, 4)
    store.put(RunKeys(run).outcome(corrupt.attempt), b"flipped")
    store.put(RunKeys(run).tombstone(hidden.attempt, names.new_ulid(0)), b"its deletion has begun")
    assert join(client, run, "newest", 1, 0).checkpoint.id == usable.id
    assert join(client, run, "named", 1, 0, checkpoint=superseded.id).checkpoint.id == superseded.id
    with pytest.raises(CorruptObject):
        join(client, run, "corrupt", 1, 0, checkpoint=corrupt.id)
    with pytest.raises(NoCheckpoint):
        join(client, run, "hidden", 1, 0, checkpoint=hidden.id)
    assert len(client.restore_sessions(run)) == 2


def test_a_run_without_checkpoints_has_nothing_to_restore(client: DaemonClient, run: str) -> None:
    with pytest.raises(NoCheckpoint):
        join(client, run, "k", 1, 0)
    assert client.restore_sessions(run) == []


def test_an_unmounted_volume_is_not_an_empty_one(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    checkpoint = write_checkpoint(open_store(str(folder)), "gpt", 1, SMALL)
    with running_daemon(folder.as_uri()) as daemon, daemon.client() as client:
        folder.rename(tmp_path / "elsewhere")
        for wanted in (None, checkpoint.id):
            with pytest.raises(StoreUnavailable):
                join(client, "gpt", "k", 1, 0, checkpoint=wanted)
        (tmp_path / "elsewhere").rename(folder)
        assert join(client, "gpt", "k", 1, 0).checkpoint.id == checkpoint.id


def test_ranks_that_disagree_are_refused(store: Store, client: DaemonClient, run: str) -> None:
    first, second = _write(store, run, 1, 2)
    session = join(client, run, "k", 4, 0)
    with pytest.raises(Conflict, match="has 4 ranks, but rank 1 sent 8"):
        join(client, run, "k", 8, 1)
    with pytest.raises(Conflict, match=f"restores {second.id}, but rank 1 requested {first.id}"):
        join(client, run, "k", 4, 1, checkpoint=first.id)
    for same in (None, second.id, f"{run}@2", f"{run}@latest"):
        assert join(client, run, "k", 4, 1, checkpoint=same).id == session.id
    with pytest.raises(InvalidRequest, match="rank 4 is not in a world of 4 ranks"):
        join(client, run, "k", 4, 4)
    with pytest.raises(InvalidRequest, match="rank 4 is not in a world of 4 ranks"):
        client.report_restore(session.id, 4, Phase.FETCHING)
    with pytest.raises(InvalidRequest, match="is not a checkpoint of run"):
        join(client, run, "k3", 4, 0, checkpoint="other@1")


def test_a_wait_ends_when_all_ranks_are_restored(store: Store, daemon: Daemon, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    id = join(client, run, "k", 3, 0).id
    with _waiting(daemon, id) as (poll,):
        for rank in range(3):
            assert not poll.done()
            status = client.report_restore(id, rank, Phase.RESTORED, 10, 10)
        assert (status.state, status.num_restored) == (RestoreState.RESTORED, 3)
        session = poll.result(timeout=60)
    assert (session.state, session.num_joined, session.done_bytes) == (RestoreState.RESTORED, 3, 30)
    assert (session.expires_at, session.ended_at is not None, session.problem) == (None, True, "")
    assert client.cancel_restore(id).state is RestoreState.RESTORED
    assert daemon.get(f"{bodies.RESTORES}/{id}?wait=55", timeout=50).json()["state"] == "restored"


def test_a_wait_ends_when_its_time_is_up(store: Store, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    session, began = join(client, run, "k", 2, 0), time.monotonic()
    assert client.restore_session(session.id, wait_s=0.5).state is RestoreState.RESTORING
    assert time.monotonic() - began >= 0.5


def test_many_waiting_requests_block_no_others(store: Store, daemon: Daemon, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    id = join(client, run, "k", 1, 0).id
    with _waiting(daemon, id, count=80) as polls:
        assert client.latest(run).step == 1
        assert not any(poll.done() for poll in polls)
        client.report_restore(id, 0, Phase.RESTORED)
        assert {poll.result(timeout=60).state for poll in polls} == {RestoreState.RESTORED}


def test_a_rank_that_fails_ends_it_for_all(store: Store, daemon: Daemon, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    id = join(client, run, "k", 8, 0).id
    problem = "rank 5 failed: chunk 17 is corrupt"
    with _waiting(daemon, id) as (poll,):
        client.report_restore(id, 5, Phase.FAILED, problem="chunk 17 is corrupt")
        assert (poll.result(timeout=60).state, poll.result().problem) == (RestoreState.FAILED, problem)
    before = client.restore_session(id)
    status = client.report_restore(id, 0, Phase.FETCHING, 1, 2)
    assert (status.state, status.problem) == (RestoreState.FAILED, problem)
    assert client.restore_session(id) == before
    with pytest.raises(Conflict, match="rank 5 failed: chunk 17"):
        join(client, run, "k", 8, 1)


def test_a_silent_rank_ends_it_and_is_named(store: Store, daemon: Daemon, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    id = join(client, run, "k", 3, 0, ttl_s=2).id
    client.report_restore(id, 2, Phase.RESTORED)
    client.report_restore(id, 1, Phase.PLANNING)
    with _waiting(daemon, id) as (poll,):
        while not poll.done():
            client.report_restore(id, 0, Phase.FETCHING, 1, 2)
            time.sleep(0.05)
        session = poll.result()
    assert session.state is RestoreState.EXPIRED
    assert session.problem.startswith("no report for 2 s from ")
    assert session.problem.endswith("rank 1 (planning)")
    assert session.ended_at is not None


def test_a_prune_waits_for_the_end(store: Store, client: DaemonClient, run: str) -> None:
    old, _ = _write(store, run, 1, 2)
    id = join(client, run, "k", 1, 0, checkpoint=old.id).id
    pruned = client.prune(Prune(Policy(1), run))
    assert [decision.reasons for decision in pruned.decisions] == [("last-1",), (f"lease:restore {id}",)]
    assert steps(store, run) == [2, 1]
    client.report_restore(id, 0, Phase.RESTORED)
    wait_until(lambda: not _leases(store, run), "the release of the lease")
    client.prune(Prune(Policy(1), run))
    assert (steps(store, run), client.restore_session(id).checkpoint.id) == ([2], old.id)


def test_a_cancelled_restore_lets_go_at_once(store: Store, daemon: Daemon, client: DaemonClient, run: str) -> None:
    old, _ = _write(store, run, 1, 2)
    id = join(client, run, "k", 2, 0, checkpoint=old.id).id
    with _waiting(daemon, id) as (poll,):
        assert client.cancel_restore(id).state is RestoreState.CANCELLED
        assert poll.result(timeout=60).state is RestoreState.CANCELLED
    client.prune(Prune(Policy(1), run))
    assert steps(store, run) == [2]
    assert client.cancel_restore(id).state is RestoreState.CANCELLED
    assert client.report_restore(id, 0, Phase.FETCHING).state is RestoreState.CANCELLED
    with pytest.raises(NotFound):
        client.cancel_restore(_GOOD_ULID)


def test_ranks_go_on_after_the_daemon_was_killed(store: Store, run: str, tmp_path: Path) -> None:
    _write(store, run, 1, 2)
    db = f"sqlite:///{tmp_path}/index.db"
    # The second one leads soon, and releases the lease.
    port = ("--port", str(free_port()), "--leader-lease-seconds", "2")
    with running_daemon(store.url, db, options=port) as first, first.client() as client:
        before = join(client, run, "k", 3, 0, ttl_s=30)
        client.report_restore(before.id, 0, Phase.RESTORED, 10, 10)
        client.report_restore(before.id, 1, Phase.FETCHING, 5, 10)
        first.kill()
        with pytest.raises(DaemonUnavailable):
            client.report_restore(before.id, 1, Phase.FETCHING, 6, 10)
        _write(store, run, 3)
        with running_daemon(store.url, db, options=port) as second:
            session = join(client, run, "k", 3, 2)
            assert (session.id, session.checkpoint) == (before.id, before.checkpoint)
            assert (session.num_joined, session.num_restored, session.done_bytes) == (3, 1, 15)
            with _waiting(second, session.id) as (poll,):
                client.report_restore(session.id, 1, Phase.RESTORED, 10, 10)
                client.report_restore(session.id, 2, Phase.RESTORED, 10, 10)
                assert poll.result(timeout=60).state is RestoreState.RESTORED
            wait_until(lambda: not _leases(store, run), "the release of the lease")


def test_a_daemon_that_leaves_answers_those_that_wait(store: Store, run: str) -> None:
    _write(store, run, 1)
    with running_daemon(store.url, options=("--drain-seconds", "50")) as daemon:
        with daemon.client() as client:
            id = join(client, run, "k", 1, 0).id
        with _waiting(daemon, id) as (poll,):
            assert daemon.stop() == 0  # raises after 30 s
            assert poll.result(timeout=60).state is RestoreState.RESTORING


def test_listings_are_newest_first(store: Store, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    ids = [join(client, run, f"k{number}", 2, 0).id for number in range(3)]
    client.report_restore(ids[2], 0, Phase.FETCHING, 1, 4)
    client.cancel_restore(ids[1])
    found = client.restore_sessions(run)
    assert [session.id for session in found] == ids[::-1]
    assert [session.id for session in client.restore_sessions(run, limit=1)] == ids[2:]
    assert [session.id for session in client.restore_sessions(limit=3)] == ids[::-1]
    assert found[0].slowest is not None
    assert (found[0].slowest.rank, found[0].progress, found[0].ranks) == (0, 0.125, None)
    assert (found[1].slowest, found[1].progress) == (None, None)


def test_a_look_shows_who_is_behind(store: Store, client: DaemonClient, run: str) -> None:
    _write(store, run, 1)
    id = join(client, run, "k", 3, 0).id
    for rank, done in ((0, 90), (1, 10), (2, 80)):
        client.report_restore(id, rank, Phase.FETCHING, done, 100)
    session = client.restore_session(id)
    assert session.stragglers == [1]
    assert session.progress == pytest.approx(0.6)
    assert session.slowest is not None
    assert (session.slowest.rank, session.slowest.done_bytes) == (1, 10)
    assert client.restore_session(id, ranks=False).ranks is None


def test_metrics_count_sessions_by_state(store: Store, run: str) -> None:
    _write(store, run, 1)
    with running_daemon(store.url) as daemon, daemon.client() as client:
        join(client, run, "a", 2, 0)
        client.cancel_restore(join(client, run, "b", 2, 0).id)
        text = daemon.get("/metrics").text
    counted = [line for line in text.splitlines() if line.startswith("ckptd_restores{")]
    assert counted == [
        'ckptd_restores{state="restoring"} 1.0', 'ckptd_restores{state="restored"} 0.0',
        'ckptd_restores{state="failed"} 0.0', 'ckptd_restores{state="expired"} 0.0',
        'ckptd_restores{state="cancelled"} 1.0',
    ]  # fmt: skip
