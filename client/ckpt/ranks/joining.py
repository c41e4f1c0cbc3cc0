"""Joining a group: all of its ranks find the keys of this life of the job, and never those of an earlier one.

The key-value store may be older than the job's processes: torchrun starts killed workers again on the store of its
agent, where the values of the killed ones still are. So rank 0 chooses a prefix that no life before had. Another rank
sets a number of its own and waits until rank 0 has answered just this number with the prefix.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from ckpt.lazily import torch
from ckpt.ranks.jax_store import JaxStore
from ckptstore.clock import system_clock
from ckptstore.errors import RankLost
from ckptstore.format.decoding import decode_msgpack
from ckptstore.names import new_ulid
from ckptstore.retry import pauses

logger = logging.getLogger(__name__)

_FIRST_POLL_S, _LONGEST_POLL_S = 0.001, 0.25
_GROWTH = 1.1  # 20 ms after 0.2 s, the longest after 2.5 s: a rank that comes late waits a tenth longer

Ask = Callable[..., Any]
"""Calls a method of a store. Raises RankLost if the store is gone."""


def prefixed(prefix: str, store: Any) -> Any:
    """A store whose keys are those of another one with this prefix."""
    if isinstance(store, JaxStore):
        return store.below(prefix)
    return torch.distributed.distributed_c10d.PrefixStore(prefix, store)


class Host:
    """Rank 0: answers the other ranks from a thread of its own, until all have joined."""

    def __init__(self, store: Any, size: int, ask: Ask) -> None:
        self._store = store
        self._ask = ask
        self._prefix = new_ulid(system_clock())
        self._answered = dict.fromkeys(range(1, size), b"")
        """The number that was answered last, by rank that has not joined yet."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-join", daemon=True)
        self._thread.start()

    @property
    def joined(self) -> Any:
        """The store for this life."""
        return prefixed(self._prefix, self._store)

    def close(self) -> None:
        """Answer no more."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        waits = pauses(_FIRST_POLL_S, _LONGEST_POLL_S, factor=_GROWTH, jitter=False)
        try:
            while self._answered and not self._stop.wait(next(waits)):
                for rank in list(self._answered):
                    self._answer(rank)
        except RankLost:
            logger.debug("the store of the process group is gone", exc_info=True)

    def _answer(self, rank: int) -> None:
        if self._ask(self._store.check, [f"{self._prefix}/joined/{rank}"]):
            del self._answered[rank]
        elif self._ask(self._store.check, [f"hello/{rank}"]):
            number = bytes(self._ask(self._store.get, f"hello/{rank}"))
            if number != self._answered[rank]:
                self._answered[rank] = number
                answer = msgspec.msgpack.encode((number, self._prefix))
                self._ask(self._store.set, f"welcome/{rank}", answer)


class Guest:
    """Another rank. `look` does not wait."""

    def __init__(self, store: Any, rank: int, ask: Ask) -> None:
        self._store = store
        self._rank = rank
        self._ask = ask
        self._number = new_ulid(system_clock()).encode()
        ask(store.set, f"hello/{rank}", self._number)

    def look(self) -> Any:
        """The store for this life; None before rank 0 has answered."""
        welcome = f"welcome/{self._rank}"
        if not self._ask(self._store.check, [welcome]):
            return None
        answer = bytes(self._ask(self._store.get, welcome))
        number, prefix = decode_msgpack(answer, tuple[bytes, str])
        if number != self._number:
            return None
        self._ask(self._store.set, f"{prefix}/joined/{self._rank}", "")
        return prefixed(prefix, self._store)
