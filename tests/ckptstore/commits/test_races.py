"""One winner of every race, on stores with create-only writes and on one without; and replies that get lost.

CKPTD_TEST_ROUNDS makes the races longer.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptapi.remote_create import DaemonRemoteCreate, with_remote_create
from ckptstore import names
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.commit import commit_attempt, decide, read_outcome
from ckptstore.errors import StoreUnsafe
from ckptstore.format.documents import Committed, Outcome
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import hide, list_hidden, sweep, undelete
from ckptstore.run import Run
from ckptstore.stores import Store, multipart, open_store
from ckptstore.stores.checks import check_store, creates_once, probe_store
from ckptstore.stores.remote_create import RemoteCreateStore
from tests.ckptstore.proxies import Fault, LossyProxy, lossy_proxy
from tests.support.checkpoints import RUN, keys, write_checkpoint, write_rank
from tests.support.daemons import running_daemon
from tests.support.seaweed import BUCKET, S3Service
from tests.support.stores import race

ROUNDS = int(os.environ.get("CKPTD_TEST_ROUNDS", "5"))
PROCESSES = 3
_PART_BYTES = 5 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A store as a saver opens it: in another process as well."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    daemon: str | None = None
    contestants: int = 5

    def open(self, **options: Any) -> RemoteCreateStore:
        return with_remote_create(open_store(self.url, {**self.options, **options}), self.daemon, None)

    def truth(self) -> Store:
        return open_store(self.url, self.options)


@pytest.fixture(scope="module")
def one_daemon(gateway: S3Service) -> Iterator[Place]:
    """A daemon that decides for a prefix on it."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    # It should leave to the tests what they race for.
    calm = ("--commit-grace-seconds", "600", "--poll-seconds", "600")
    with running_daemon(url, options=calm, environment={**os.environ, **gateway.environment}) as daemon:
        yield Place(url, gateway.options, daemon.url)


@pytest.fixture
def remote_create_place(one_daemon: Place) -> Place:
    """The same, empty."""
    store = one_daemon.truth()
    store.delete_many(keys(store))
    return one_daemon


@pytest.fixture(params=["folder", "seaweedfs", "juicefs through a daemon"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place(str(tmp_path / "store"))
    if request.param == "seaweedfs":
        location = request.getfixturevalue("s3_store")
        # It makes the third one wait for a second.
        return Place(location.url, location.options, contestants=3)
    return request.getfixturevalue("remote_create_place")  # type: ignore[no-any-return]


# Races. A contestant's clock is its signature: the outcome says who made it.


@dataclass(frozen=True, slots=True)
class Finished:
    """An attempt that lacks nothing but its outcome, and what that outcome would commit."""

    attempt: Attempt
    committed: Committed


def write_attempts(store: Store, count: int) -> list[Finished]:
    elsewhere = open_store(f"memory://{uuid.uuid4().hex}")
    run = Run(elsewhere, RUN)
    finished = []
    for step in range(count):
        attempt = Attempt(step, new_ulid(system_clock()))
        committed = commit_attempt(run, [write_rank(elsewhere, RUN, attempt, {})]).committed
        assert committed is not None
        for info in elsewhere.list(run.keys.attempt(attempt)):
            store.put(info.key, elsewhere.get(info.key))
        finished.append(Finished(attempt, committed))
    return finished


def take_part(store: Store, finished: Finished, me: int) -> Outcome:
    """Commit an attempt, or give it up, if I am odd; what I take for the outcome."""
    return decide(Run(store, RUN, lambda: 1000.0 + me), finished.attempt, None if me % 2 else finished.committed)


def check_round(store: Store, finished: Finished, believed: list[Outcome]) -> None:
    """All of them believe in one outcome, which one of them made, and which the store shows to all others."""
    assert {outcome.nonce for outcome in believed} == {believed[0].nonce}, believed
    winner = int(believed[0].at - 1000)
    if winner in range(len(believed)):
        assert (believed[0].committed is None) == bool(winner % 2)
    else:
        assert believed[0].committed is not None, "the daemon commits what it finds finished"
    assert read_outcome(Run(store, RUN), finished.attempt) == believed[0]


def test_threads_race(place: Place) -> None:
    stores = [place.open() for _ in range(place.contestants)]
    for finished in write_attempts(stores[0], ROUNDS):
        results = race(*(partial(take_part, store, finished, me) for me, store in enumerate(stores)))
        assert not [result for result in results if isinstance(result, BaseException)]
        check_round(place.truth(), finished, results)  # type: ignore[arg-type]


_start: Barrier


def _meet(barrier: Barrier) -> None:
    global _start
    _start = barrier


def _take_part_in_all(place: Place, attempts: list[Finished], me: int) -> list[Outcome]:
    store = place.open()
    believed = []
    for finished in attempts:
        _start.wait(60)
        believed.append(take_part(store, finished, me))
    return believed


def test_processes_race(place: Place) -> None:
    store = place.truth()
    rounds, context = ROUNDS if place.options else 10 * ROUNDS, multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # one interpreter imports all of it, and not each contestant
    attempts = write_attempts(store, rounds)
    with context.Pool(PROCESSES, _meet, (context.Barrier(PROCESSES),)) as pool:
        pending = [pool.apply_async(_take_part_in_all, (place, attempts, me)) for me in range(PROCESSES)]
        believed = [result.get(timeout=120 + rounds) for result in pending]
    for finished, outcomes in zip(attempts, zip(*believed, strict=True), strict=True):
        check_round(store, finished, list(outcomes))


def test_a_sweep_and_an_undelete_never_both_win(place: Place) -> None:
    deleter, owner = place.open(), place.open()
    run = Run(owner, RUN, by="owner")
    for step in range(ROUNDS // 2):
        checkpoint = write_checkpoint(deleter, RUN, step, {})
        attempt = checkpoint.attempt
        hide(Run(deleter, RUN, by="deleter"), [attempt], "old")
        swept, _ = race(partial(sweep, Run(deleter, RUN, by="deleter"), [attempt]), partial(undelete, run, attempt))
        assert not isinstance(swept, BaseException), swept
        back = checkpoint in list_checkpoints(run)
        assert back == (read_outcome(run, attempt) is not None)
        assert back == (attempt not in [hidden.attempt for hidden in list_hidden(run)])
        assert back == bool(keys(owner, run.keys.attempt(attempt)))


# The store that lies.


def test_the_gateway_overwrites_and_is_found_out(overwriting: Store) -> None:
    assert overwriting.put_if_absent("run/a", b"first")
    assert overwriting.put_if_absent("run/a", b"second"), "if it refuses now, it can be used for no test here"
    assert overwriting.get("run/a") == b"second"
    assert race(*(partial(overwriting.put_if_absent, "run/b", b"%d" % me) for me in range(6))).count(True) > 1
    assert not probe_store(overwriting, system_clock).creates_once
    assert not creates_once(overwriting, system_clock)
    assert keys(overwriting, names.PROBES_PREFIX) == []


def test_without_a_daemon_savers_warn_and_deleters_refuse(overwriting: Store, caplog: pytest.LogCaptureFixture) -> None:
    store = with_remote_create(overwriting, None, None)
    run = Run(store, RUN)
    with caplog.at_level(logging.WARNING):
        first, second = (write_checkpoint(store, RUN, step, {}) for step in (1, 2))
    assert [record.message for record in caplog.records if "overwrites" in record.message][1:] == []
    assert "CKPTD_URL" in caplog.text
    assert list_checkpoints(run) == [second, first]
    outcome = read_outcome(run, first.attempt)
    assert decide(run, first.attempt, None) == outcome, "one after the other they still agree"
    for unsafe in (overwriting, store):
        with pytest.raises(StoreUnsafe, match="accepts create-only writes and overwrites"):
            check_store(unsafe, system_clock)
    check_store(with_remote_create(overwriting, "http://127.0.0.1:9", None), system_clock)


def test_a_store_is_probed_once(s3_service: S3Service) -> None:
    with lossy_proxy(s3_service.endpoint) as proxy:
        options = {**s3_service.options, "endpoint_url": proxy.url}
        url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        for step in range(3):
            write_checkpoint(with_remote_create(open_store(url, options), None, None), RUN, step, {})
            probes = [request for request in proxy.requests if names.PROBES_PREFIX in request]
            assert bool(probes) == (step == 0)
            proxy.arm(None)


# Lost replies.


def check_every_position(proxy: LossyProxy, faults: list[Fault], save: Callable[[int], Outcome], truth: Store) -> None:
    """Save once for each request of a save, with a fault there. `truth`: the same store, without a proxy between."""
    run = Run(truth, RUN)
    save(0)
    proxy.arm(None)
    save(1)
    positions = len(proxy.requests)
    believed: list[Outcome] = []
    for fault in faults:
        for position in range(positions):
            proxy.arm(fault, position)
            believed.append(save(2 + len(believed)))
            assert len(proxy.requests) >= positions, "the fault was met"
    proxy.arm(None)
    for outcome in believed:
        assert read_outcome(run, Attempt.parse(outcome.attempt)) == outcome
    listed = list_checkpoints(run)
    assert len(listed) == 2 + len(believed)
    for checkpoint in listed:
        report = verify(StoreSource(truth), checkpoint, threads=1)
        assert report.ok, report.problems


def save_in_parts(store: Store, step: int) -> Outcome:
    """A checkpoint of one shard, which is uploaded in two parts."""
    attempt = Attempt(step, new_ulid(system_clock()))
    noise = np.random.default_rng(step).integers(0, 256, _PART_BYTES + 1000, dtype=np.uint8)
    receipt = write_rank(store, RUN, attempt, {"model/a": noise})
    return commit_attempt(Run(store, RUN), [receipt])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "PART_BYTES", _PART_BYTES)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["reset", "twice"])
def test_replies_of_the_store_get_lost(s3_service: S3Service, fault: Fault) -> None:
    place = Place(f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_service.options)
    with lossy_proxy(s3_service.endpoint) as proxy:
        save = partial(save_in_parts, place.open(endpoint_url=proxy.url))
        check_every_position(proxy, [fault], save, place.truth())


@pytest.mark.usefixtures("small_parts")
def test_replies_of_a_store_that_overwrites_get_lost(remote_create_place: Place) -> None:
    with lossy_proxy(remote_create_place.options["endpoint_url"]) as proxy:
        save = partial(save_in_parts, remote_create_place.open(endpoint_url=proxy.url))
        check_every_position(proxy, ["reset"], save, remote_create_place.truth())


def test_a_store_that_never_answers_a_commit(s3_service: S3Service) -> None:
    place = Place(f"s3://{BUCKET}/{uuid.uuid4().hex}", s3_service.options)
    with lossy_proxy(s3_service.endpoint) as proxy:
        store = place.open(endpoint_url=proxy.url, config_kwargs={"read_timeout": 0.5})
        truth = place.truth()

        def commit(step: int) -> Outcome:
            receipt = write_rank(truth, RUN, Attempt(step, new_ulid(system_clock())), {})
            return commit_attempt(Run(store, RUN), [receipt])

        check_every_position(proxy, ["hang"], commit, truth)


def test_replies_of_the_daemon_get_lost(remote_create_place: Place) -> None:
    truth = remote_create_place.truth()
    assert remote_create_place.daemon is not None
    with lossy_proxy(remote_create_place.daemon) as proxy:
        store = RemoteCreateStore(truth, DaemonRemoteCreate(truth, proxy.url, None, answer_s=0.5).decide)

        def save(step: int) -> Outcome:
            receipt = write_rank(store, RUN, Attempt(step, new_ulid(system_clock())), {})
            return commit_attempt(Run(store, RUN), [receipt])

        check_every_position(proxy, ["reset", "hang", "twice"], save, truth)
