"""Services of object stores: a whole life on each, replies that get lost, and what their errors mean.

They are tests/support/gcs.py and Azurite; with CKPTD_STORES=all also SeaweedFS and Ceph, where that is installed.
CKPTD_CLOUD_FAULTS says how many saves on each lose replies.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec.config
import numpy as np
import pytest

from ckpt import Checkpointer
from ckptstore.clock import system_clock
from ckptstore.commits.catalog import list_checkpoints
from ckptstore.commits.commit import commit_attempt, read_outcome
from ckptstore.errors import StoreReadOnly, StoreUnavailable, StoreUnsafe
from ckptstore.format.records import Policy
from ckptstore.names import Attempt, new_ulid
from ckptstore.reading.source import StoreSource
from ckptstore.reading.verify import verify
from ckptstore.retention.deletion import collect
from ckptstore.retention.pruning import apply_prune, plan_prune
from ckptstore.run import Run
from ckptstore.stores import Store, multipart, open_store
from ckptstore.stores.base import is_lasting
from ckptstore.stores.checks import check_store, run_store_checks
from ckptstore.stores.retrying import RetryingStore
from tests.ckptstore.proxies import LossyProxy, lossy_proxy
from tests.conftest import ALL_STORES, cloud_options, cloud_place, cloud_service
from tests.support.checkpoints import RUN, flipped, keys, write_rank
from tests.support.command_line import succeed
from tests.support.kill_train import weights
from tests.support.ports import free_port
from tests.support.seaweed import BUCKET
from tests.support.stores import race
from tests.support.trainers import Trainer, is_alive
from tests.support.waiting import wait_until

FAULTS = int(os.environ.get("CKPTD_CLOUD_FAULTS", "8"))
KINDS = ("gcs", "azure", *(("s3", "ceph") if ALL_STORES else ()))
MIB, DAY_S = 1 << 20, 86_400.0

every_cloud = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def service(request: pytest.FixtureRequest, kind: str) -> str:
    return cloud_service(request, kind)


@pytest.fixture
def impatient(kind: str, service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries repeat what failed, at once."""

    async def sleep(_: float) -> None: ...

    if kind == "gcs":
        monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(sleep=sleep))
    elif kind == "azure":
        policies = "azure.storage.blob._shared.policies_async"
        monkeypatch.setattr(f"{policies}.ExponentialRetry.get_backoff_time", lambda *_: 0.0)


@pytest.fixture
def proxied(kind: str, service: str, impatient: None) -> Iterator[tuple[Store, LossyProxy, Store]]:
    """A fresh place, what stands before it, and the same place without that."""
    url = cloud_place(kind)
    with lossy_proxy(service) as proxy:
        yield open_store(url, cloud_options(kind, proxy.url)), proxy, open_store(url, cloud_options(kind, service))


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("run/a", b"x"),
    "put_if_absent": lambda store: store.put_if_absent("run/b", b"x"),
    "get": lambda store: store.get("run/a"),
    "range": lambda store: store.get_range("run/a", 0, memoryview(bytearray(1))),
    "size": lambda store: store.size("run/a"),
    "list": lambda store: keys(store),
    "delete": lambda store: store.delete_many(["run/c"]),
}


@every_cloud
def test_a_refusal_lasts_and_an_outage_does_not(kind: str, proxied: tuple[Store, LossyProxy, Store]) -> None:
    store, proxy, truth = proxied
    truth.put("run/a", b"x")
    for refuses in (True, False):
        proxy.refuses = lambda _, refuses=refuses: refuses  # type: ignore[misc]
        proxy.away = None if refuses else "busy"
        for name, call in CALLS.items():
            with pytest.raises(StoreReadOnly if refuses else StoreUnavailable) as caught:
                call(store)
            assert (name, is_lasting(caught.value)) == (name, refuses)
    proxy.away = None
    for call in CALLS.values():
        call(store)


@every_cloud
def test_eight_writers_have_one_winner(kind: str, service: str) -> None:
    stores = [open_store(cloud_place(kind), cloud_options(kind, service))] * 8
    for number in range(40):
        key = f"run/{number}"
        results = race(*(partial(store.put_if_absent, key, b"%d" % me) for me, store in enumerate(stores)))
        assert (results.count(True), results.count(False)) == (1, 7), results
        assert stores[0].get(key) == b"%d" % results.index(True)


@every_cloud
def test_a_whole_life(kind: str, service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves, a saver that is killed, a restore, and every verb of an operator."""
    url, options = cloud_place(kind), cloud_options(kind, service)
    scheme = url.partition(":")[0].upper()
    environment = {f"FSSPEC_{scheme}_{name.upper()}": value for name, value in options.items()}
    monkeypatch.setitem(fsspec.config.conf, scheme.lower(), options)
    store = open_store(url, options)
    run = Run(store, "kill")
    trainer = Trainer(url, environment={**os.environ, **environment})
    try:
        wait_until(lambda: trainer.saved >= 3)
        os.kill(trainer.saver, signal.SIGKILL)
        wait_until(lambda: trainer.deaths == 1)
        died_at = trainer.saved
        wait_until(lambda: trainer.saved >= died_at + 3 and len(list_checkpoints(run)) >= 4)
    finally:
        trainer.kill()
        wait_until(lambda: not is_alive(trainer.saver))
    with Checkpointer(url, run="kill", options=options) as checkpointer:
        newest = checkpointer.latest()
        assert newest is not None
        assert np.array_equal(checkpointer.load(newest.id)["model/w"].numpy(), weights(newest.step).numpy())

    on = ("--store", url, "-o", "json")
    steps = [checkpoint.step for checkpoint in list_checkpoints(run)]
    succeed("prune", "kill", "--keep", "2", "--force", "--yes", *on)  # there may be any number of them
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == steps[:2]
    succeed("undelete", f"kill@{steps[2]}", *on)
    assert [checkpoint.step for checkpoint in list_checkpoints(run)] == steps[:3]
    succeed("cp", "kill", "--to", tmp_path / "copy", *on)
    succeed("prune", "kill", "--keep", "2", "--grace", "0s", "--yes", *on)
    collect(Run(store, "kill", lambda: system_clock() + 2 * DAY_S), grace_s=0.0)
    left = {str(checkpoint.attempt) for checkpoint in list_checkpoints(run)}
    assert {info.key.split("/")[-2] for info in store.list(run.keys.attempts)} == left

    (victim,) = (checkpoint.attempt for checkpoint in list_checkpoints(run) if checkpoint.step == steps[0])
    shard = next(info.key for info in store.list(run.keys.attempt(victim)) if info.key.endswith(".ckpt"))
    intact = store.get(shard)
    store.put(shard, flipped(intact, 1000))
    seen: list[bytes] = []
    healed = partial(succeed, "scrub", "kill", "--heal", "--from", tmp_path / "copy", *on)
    watching = True

    def watch() -> None:
        while watching:
            seen.append(store.get(shard))

    def heal() -> None:
        nonlocal watching
        try:
            healed()
        finally:
            watching = False

    assert race(heal, watch) == [None, None], "a reader found the old object or the new one, always"
    assert store.get(shard) == intact
    assert {*seen} <= {intact, flipped(intact, 1000)}
    assert all(body["ok"] for body in succeed("verify", "*", *on).json)


@every_cloud
@pytest.mark.slow
def test_replies_that_get_lost(
    kind: str, proxied: tuple[Store, LossyProxy, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a save believes is true, and what is listed is whole. Every fourth save has three parts side by side."""
    monkeypatch.setattr(multipart, "PART_BYTES", 5 * MIB)
    away, proxy, truth = proxied
    store, run = RetryingStore(away, 20.0, lambda _: None), Run(truth, RUN)
    dice, kinds = random.Random(46), ["reset", "twice", "cut"]
    data = np.random.default_rng(1).integers(0, 256, 11 * MIB, dtype=np.uint8)
    believed: dict[Attempt, bool] = {}

    def save(step: int) -> None:
        attempt = Attempt(step, new_ulid(system_clock()))
        believed[attempt] = False
        arrays = {"model/a": data if step % 4 == 0 else data[: MIB // 4]}
        receipt = store.repeat(partial(write_rank, store, RUN, attempt, arrays))
        outcome = commit_attempt(Run(store, RUN), [receipt])
        believed[attempt] = outcome.committed is not None

    proxy.arm(None)
    save(0)
    requests = len(proxy.requests)
    for step in range(1, FAULTS + 1):
        fault: Any = dice.choice(kinds)
        proxy.arm(fault, dice.randrange(requests))
        save(step)
        proxy.arm(fault, dice.randrange(4))
        listed = list_checkpoints(Run(store, RUN))
        assert {checkpoint.attempt for checkpoint in listed} == {
            checkpoint.attempt for checkpoint in list_checkpoints(run)
        }
        proxy.arm(fault, dice.randrange(4))
        assert verify(StoreSource(store), listed[0], threads=1).ok
        if not step % 5:
            proxy.arm(fault, dice.randrange(9))
            apply_prune(Run(store, RUN), plan_prune(Run(store, RUN), Policy(3)))
            collect(Run(store, RUN))
    proxy.arm(None)
    assert all(believed.values())
    for checkpoint in list_checkpoints(run):
        assert read_outcome(run, checkpoint.attempt) is not None
        assert verify(StoreSource(truth), checkpoint, threads=1).ok


def test_an_emulator_that_ignores_preconditions_is_found_out() -> None:
    port, emulator = free_port(), pytest.importorskip("gcp_storage_emulator.server")
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        store = open_store(cloud_place("gcs"), cloud_options("gcs", f"http://127.0.0.1:{port}"))
        report = run_store_checks(store, system_clock)
        assert [check.name for check in report.checks if not check.ok] == ["create once", "one winner"]
        assert not report.conditional_writes
        with pytest.raises(StoreUnsafe):
            check_store(store, system_clock)
    finally:
        server.stop()


@pytest.mark.parametrize("kind", ["gcs", "azure"])
def test_how_the_libraries_are_used(kind: str, service: str) -> None:
    """Listings never from a cache, whatever is asked for; of Google by HTTP alone, also for the type of a bucket."""
    opened: Any = open_store(cloud_place(kind), {**cloud_options(kind, service), "use_listings_cache": True})
    assert not opened._fs.dircache.use_listings_cache
    assert "extended" not in type(opened._fs).__module__
