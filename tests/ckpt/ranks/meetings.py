"""What ranks do in tests of World: scenarios for tests.support.parallel.runner."""

from __future__ import annotations

import logging
import os
import signal
import time
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from ckpt.ranks import world as ranks_world
from ckpt.ranks.world import World
from ckptstore.errors import RankLost
from tests.support.waiting import wait_until


def meet(rounds: int) -> dict[str, Any]:
    """Several meetings, in two worlds after one another; what was received, and which keys are left."""
    store = World(30)._store
    heard: list[Any] = []
    for world in (World(30), World(30)):
        for number in range(rounds):
            heard.append(world.gather([number, world.rank, b"\x00\xff", None]))
            heard.append(world.broadcast({"from": world.rank, "number": number}))
    World(30).gather("end")
    dist.barrier()  # rank 0 clears up after it has answered
    keys = [f"{number}{of_rank}" for number in range(4 * rounds + 2) for of_rank in ("", "/0", "/1", "/2")]
    left = [key for key in keys if store.check([key])]
    dist.barrier()  # the store may live in rank 0
    return {"heard": repr(heard), "left": left}


def live_twice() -> list[list[Any]]:
    """Two lives of a job on one store, as after a restart by torchrun. In the second, rank 0 is the last to come."""
    store = dist.distributed_c10d._get_default_store()
    first = World(30).gather(["first", dist.get_rank()])
    dist.barrier()
    ranks_world._meetings.clear()  # as in a new process
    if dist.get_rank() == 0:
        store.wait(["second life"])
    else:
        store.set("second life", "")
    return [first, World(30).gather(["second", dist.get_rank()])]


def lose(lost: int, how: str, meeting: str, timeout_s: float) -> dict[str, Any]:
    """One rank ends between two meetings; what the others report."""
    world = World(timeout_s)
    try:
        world.gather(None)
        if world.rank == lost:
            os.kill(os.getpid(), getattr(signal, how))
        world.gather(None) if meeting == "gather" else world.broadcast(None)
    except RankLost as error:
        return {"said": str(error)}
    return {"said": "all are here"}


def come_late(notice_s: float) -> list[str]:
    """Ranks 1 and 2 come after the notice of rank 0 is logged; what rank 0 logged."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt.ranks.world").addHandler(handler)
    world, store = World(30), dist.distributed_c10d._get_default_store()
    ranks_world.NOTICE_S = notice_s
    if world.rank:
        store.wait(["logged"])
    else:
        Thread(target=_set_when, args=(store, logged), daemon=True).start()
    world.gather(None)
    return logged


def _set_when(store: Any, logged: list[str]) -> None:
    wait_until(lambda: logged)
    store.set("logged", "")


def be_slow(timeout_s: float) -> list[Any]:
    """Rank 1 comes late to a meeting, and gives signs of life from another thread meanwhile."""
    world = World(timeout_s)
    world.gather(None)
    if world.rank == 1:
        done = Event()
        beating = Thread(target=_beat, args=(world, done))
        beating.start()
        time.sleep(2 * timeout_s)
        done.set()
        beating.join()
    heard = world.gather(world.rank)
    dist.barrier()  # the store may live in rank 0
    return heard


def _beat(world: World, done: Event) -> None:
    while not done.wait(0.05):
        world.beat()
