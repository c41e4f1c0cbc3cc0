from __future__ import annotations

import asyncio
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from ckptd.app import create_app
from ckptd.http.concurrency import ConcurrencyLimit, FairSemaphore
from ckptd.settings import Settings
from ckptstore import names
from ckptstore.errors import TooManyRequests
from ckptstore.stores import open_store
from tests.support.checkpoints import write_checkpoint
from tests.support.stores import CountingStore, serving
from tests.support.waiting import wait_until

SHARD = names.shard_name(0)


def test_turns_come_round_however_many_one_client_wants() -> None:
    async def run() -> list[str]:
        slots, order = FairSemaphore(2), list[str]()

        async def read(client: str) -> None:
            async with slots.slot(client):
                order.append(client)
                await asyncio.sleep(0)

        greedy = [asyncio.create_task(read("greedy")) for _ in range(50)]
        await asyncio.sleep(0)
        modest = [asyncio.create_task(read(name)) for name in ("a", "b") for _ in range(5)]
        await asyncio.gather(*greedy, *modest)
        return order

    order = asyncio.run(run())
    assert Counter(order) == {"greedy": 50, "a": 5, "b": 5}
    # In rotation: each of the modest has had five turns when the greedy one has had five more.
    assert Counter(order[:20])["a"] >= 4
    assert Counter(order[:20])["b"] >= 4


def test_turns_of_cancelled_waiters_are_passed_on() -> None:
    async def run() -> int:
        slots, entered = FairSemaphore(1), 0

        async def read() -> None:
            nonlocal entered
            async with slots.slot("x"):
                entered += 1
                await asyncio.sleep(0.01)

        tasks = [asyncio.create_task(read()) for _ in range(40)]
        await asyncio.sleep(0.005)
        for task in tasks[1::2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(read(), 60)
        return entered

    assert asyncio.run(run()) == 21


def test_limits_per_client_and_for_all() -> None:
    limit = ConcurrencyLimit("things", 2, 3)
    with limit.use("a"), limit.use("a"):
        with pytest.raises(TooManyRequests, match="this client"), limit.use("a"):
            pass
        with limit.use("b"), pytest.raises(TooManyRequests, match="all clients"), limit.use("c"):
            pass
    with limit.use("a"):
        pass


def test_a_greedy_reader_does_not_starve_another(tmp_path: Path) -> None:
    """Sixty reads of one client wait when another one asks for four: it has them long before those have ended."""
    store = CountingStore(open_store(str(tmp_path / "store")))
    checkpoints = [write_checkpoint(store, "gpt", step) for step in range(64)]
    gate = threading.Semaphore(0)
    store.before_read = gate.acquire
    settings = Settings(store=store.url, db=f"sqlite:///{tmp_path}/index.db", auth="off", cache_bytes=0, store_reads=4)
    app = create_app(settings, store)
    with serving(app) as url, httpx.Client(timeout=60, limits=httpx.Limits(max_connections=200)) as probing:
        wait_until(lambda: probing.get(f"{url}/readyz").status_code == 200, "readiness")
        answered: list[str] = []

        def read(client: str, address: str, number: int) -> None:
            path = f"{url}/v1/checkpoints/{checkpoints[number].id}/shards/{SHARD}"
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as own:
                assert own.get(path, headers={"Range": "bytes=0-999"}).status_code == 206
            answered.append(client)

        def begin(client: str, address: str, numbers: range) -> list[threading.Thread]:
            threads = [threading.Thread(target=read, args=(client, address, number)) for number in numbers]
            for thread in threads:
                thread.start()
            return threads

        threads = begin("greedy", "127.0.0.1", range(60))
        slots = app.state.context.read_slots
        wait_until(lambda: sum(map(len, list(slots._waiting.values()))) == 60 - 24, "the greedy one's reads to wait")
        threads += begin("modest", "127.0.0.2", range(60, 64))
        wait_until(lambda: len(slots._waiting.get("127.0.0.2", ())) == 4, "the modest one's reads to wait")
        for reads in range(1, len(threads) + 1):  # one after the other: their order is the daemon's
            gate.release()
            wait_until(lambda reads=reads: len(answered) == reads, "one more answer")  # type: ignore[misc]
        for thread in threads:
            thread.join()
    assert store.most_at_a_time <= 4
    assert max(place for place, client in enumerate(answered) if client == "modest") < 50, answered
