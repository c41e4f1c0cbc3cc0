"""A store whose uploads wait at a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptstore.stores import ObjectWriter, Store, WrappedStore, open_store


class Gate:
    """Open at first. For any thread."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self.waiting = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        self._opened.clear()

    def enter(self) -> None:
        self.waiting += 1
        assert self._opened.wait(60), "the gate was not opened"
        self.waiting -= 1


class GatedStore(WrappedStore):
    def __init__(self, store: Store, gate: Gate) -> None:
        super().__init__(store)
        self._gate = gate

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        self._gate.enter()
        return super().open_writer(key, size_hint)


def gated(gate: Gate) -> Callable[..., Store]:
    """In place of open_store."""
    return lambda *args, **kwargs: GatedStore(open_store(*args, **kwargs), gate)
