"""Keeps memory in its place while a background copy reads it.

Holding a storage keeps its memory from being freed, but some calls replace the memory inside the storage and free the
old one: sharing with other processes (`share_memory_`, torch.multiprocessing) and `resize_`. While a copy is pending,
these calls wait for it if they concern a storage that it reads.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

_REPLACING = ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")
"""The methods of storages that replace memory; `share_memory_` calls one of the first two."""


class StorageHold:
    """The storages that one pending copy reads."""

    def __init__(self, storages: Callable[[], Iterable[torch.UntypedStorage]], wait: Callable[[], object]) -> None:
        """wait: returns when the memory is no longer read. For any thread."""
        self._storages = storages
        self._addresses: frozenset[int] | None = None
        self._wait = wait

    def wait_for(self, storage: torch.UntypedStorage) -> None:
        """Return when the copy no longer reads the memory of a storage."""
        if storage.device.type not in ("cpu", "cuda"):
            return  # a storage without memory, of a meta or fake tensor
        if self._addresses is None:  # computed by the first caller only: most copies see none
            self._addresses = frozenset(held.data_ptr() for held in self._storages())
        if storage.data_ptr() in self._addresses:
            self._wait()


class _Holds:
    """The holds of all pending copies of this process. The methods of storages are wrapped while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: tuple[StorageHold, ...] = ()
        self._originals: dict[str, Any] = {}
        self._wrappers: dict[str, Any] = {}
        self._pid = os.getpid()

    def add(self, hold: StorageHold) -> None:
        with self._lock:
            if not self._holds:
                self._wrap()
            self._holds = (*self._holds, hold)

    def remove(self, hold: StorageHold) -> None:
        with self._lock:
            self._holds = tuple(held for held in self._holds if held is not hold)
            if not self._holds:
                self._unwrap()

    def wait_for(self, storage: torch.UntypedStorage) -> None:
        if os.getpid() == self._pid:  # the copies of a forked child's parent do not read the child's memory
            for hold in self._holds:
                hold.wait_for(storage)

    def _wrap(self) -> None:
        self._pid = os.getpid()
        for name in _REPLACING:
            self._originals[name] = vars(torch.UntypedStorage).get(name)  # None: inherited
            self._wrappers[name] = self._waiting(getattr(torch.UntypedStorage, name))
            setattr(torch.UntypedStorage, name, self._wrappers[name])

    def _unwrap(self) -> None:
        for name in _REPLACING:
            if vars(torch.UntypedStorage).get(name) is not self._wrappers[name]:
                continue  # other code has wrapped it meanwhile
            if self._originals[name] is None:
                delattr(torch.UntypedStorage, name)
            else:
                setattr(torch.UntypedStorage, name, self._originals[name])

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wait_first(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
            self.wait_for(storage)
            return method(storage, *args, **kwargs)

        return wait_first


_holds = _Holds()


def hold_storages(hold: StorageHold) -> None:
    """From now on, calls that replace the memory of these storages wait first."""
    _holds.add(hold)


def release_storages(hold: StorageHold) -> None:
    """The copy no longer reads them."""
    _holds.remove(hold)
