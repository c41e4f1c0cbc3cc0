"""The key-value store of a job, and how the ranks of a group agree on a prefix for this life of the job.

The store may be older than the job's processes: torchrun starts killed workers again on the store of its agent, where
the values of the killed ones still are. So rank 0 chooses a prefix that no life before had. Another rank sets a number
of its own and waits until rank 0 has answered just this number with the prefix.

A job without torch uses the store of `jax.distributed`. JAX has no public interface to it; what is used of its private
one is pinned by tests/arrays/test_jax_pins.py.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from ckpt.lazily import torch
from ckptstore.clock import system_clock
from ckptstore.errors import RankLost
from ckptstore.format.decoding import decode_msgpack
from ckptstore.names import new_ulid
from ckptstore.retry import pauses

_NOT_FOUND = "NOT_FOUND"
_PATIENCE_MS = 60_000


@dataclass(frozen=True)
class JaxStore:
    """Keys below a prefix. For any thread. Raises ConnectionError if the coordinator does not answer."""

    client: Any
    _prefix: str = ""

    def below(self, prefix: str) -> JaxStore:
        """The same store with a longer prefix."""
        return JaxStore(self.client, f"{self._prefix}{prefix}/")

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, or replace it."""
        data = value.encode() if isinstance(value, str) else value
        self._ask(self.client.key_value_set_bytes, self._prefix + key, data, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return bytes(self._ask(self.client.blocking_key_value_get_bytes, self._prefix + key, _PATIENCE_MS))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have values."""
        return all(self._find(key) is not None for key in keys)

    def delete_key(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._ask(self.client.key_value_delete, self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; returns the sum."""
        return int(self._ask(self.client.key_value_increment, self._prefix + key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Replace a value if it is as expected; returns the value there is then.

        Not atomic: of two processes that do so at the same time, either may win.
        """
        if (found := self._find(key)) is not None and found != expected.encode():
            return found
        self.set(key, desired)
        return desired.encode()

    def _find(self, key: str) -> bytes | None:
        try:
            return bytes(self.client.key_value_try_get_bytes(self._prefix + key))
        except RuntimeError as error:  # JaxRuntimeError is one, and has no code
            if str(error).startswith(_NOT_FOUND):
                return None
            raise ConnectionError(str(error)) from error

    def _ask(self, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


def jax_job() -> tuple[int, int, Any] | None:
    """This process's number, the number of processes, and the client of the coordinator; None outside of a job."""
    distributed = sys.modules.get("jax._src.distributed")
    state = getattr(distributed, "global_state", None)
    if state is None or state.client is None:
        return None
    return state.process_id, state.num_processes, state.client


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


class RendezvousHost:
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
                self._ask(self._answer_all)
        except RankLost:
            logger.debug("the store of the process group is gone", exc_info=True)

    def _answer_all(self) -> None:
        store = self._store
        for rank, answered in list(self._answered.items()):
            if store.check([f"{self._prefix}/joined/{rank}"]):
                del self._answered[rank]
            elif store.check([f"join/{rank}"]) and (number := bytes(store.get(f"join/{rank}"))) != answered:
                self._answered[rank] = number
                store.set(f"reply/{rank}", msgspec.msgpack.encode((number, self._prefix)))


def join(store: Any, rank: int, ask: Ask) -> Iterator[Any]:
    """Another rank: yields None until rank 0 has answered, then the store for this life. Does not wait."""
    number, reply = new_ulid(system_clock()).encode(), f"reply/{rank}"
    ask(store.set, f"join/{rank}", number)
    while True:
        if ask(store.check, [reply]):
            answered, prefix = decode_msgpack(bytes(ask(store.get, reply)), tuple[bytes, str])
            if answered == number:
                ask(store.set, f"{prefix}/joined/{rank}", "")
                yield prefixed(prefix, store)
        yield None
