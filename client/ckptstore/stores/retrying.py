"""Retries for any store: a store that is away for a moment fails neither a save nor a restore.

Requests are repeated with growing, random pauses until a limit. An error that a retry cannot change is raised at once
(base.is_lasting). A create whose reply was lost is refused when it is repeated: see Store.put_if_absent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from typing_extensions import override

from ckptstore.errors import StoreUnavailable
from ckptstore.retry import outage_pauses, retry
from ckptstore.stores.base import ObjectReader, Store, WrappedStore, is_lasting

logger = logging.getLogger(__name__)

RETRY_S = 120.0
"""How long training retries by default."""

_T = TypeVar("_T")
_TRIES = 3


def pauses_without(store: Store) -> Iterator[float]:
    """Pauses of a call that is tried three times at once, or only once if the store itself repeats its requests."""
    return repeat(0.0, 0 if store.retry_s else _TRIES - 1)


class RetryingStore(WrappedStore):
    """Another store, whose requests are repeated for up to `retry_s` seconds each. For any thread.

    Objects that are written in pieces are the exception: `open_writer` and `open_replacement` are not repeated, and
    their writers only where the store `resumes_uploads`. Otherwise the caller begins again (`repeat`).
    """

    def __init__(
        self,
        store: Store,
        retry_s: float = RETRY_S,
        sleep: Callable[[float], object] = time.sleep,
        warn: Callable[[str], object] = logger.warning,
    ) -> None:
        """retry_s: 0 for no retries. warn: gets a message when an outage begins, and when it ends."""
        store.retry_s = retry_s
        super().__init__(store)
        self._sleep = sleep
        self._warn = warn
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._retries = 0
        self._away_since: float | None = None

    @property
    @override
    def once(self) -> Store:
        return self._store.once

    def take_retries(self) -> int:
        """The number of retries since the last call."""
        with self._lock:
            taken, self._retries = self._retries, 0
            return taken

    def repeat(self, call: Callable[[], _T]) -> _T:
        """The result of a call that may be repeated. Raises its error if it lasts, or the limit is reached."""
        result = retry(
            partial(self._watched, call), StoreUnavailable, outage_pauses(self.retry_s),
            unless=is_lasting, sleep=self._pause, log_level=logging.DEBUG,
        )  # fmt: skip
        self._answered()
        return result

    @override
    def delete_many(self, keys: Iterable[str]) -> None:
        super().delete_many([*keys])

    @override
    def open_reader(self, key: str) -> ObjectReader:
        return _RetryingReader(self, partial(self._store.open_reader, key))

    def _request(self, call: Callable[..., _T], *args: Any) -> _T:
        return self.repeat(partial(call, *args))

    def _pause(self, seconds: float) -> None:
        with self._lock:
            self._retries += 1
        self._sleep(seconds)

    def _watched(self, call: Callable[[], _T]) -> _T:
        """Call, and warn of the first failure of an outage."""
        try:
            return call()
        except StoreUnavailable as error:
            if self.retry_s and not is_lasting(error):
                with self._lock:
                    first = self._away_since is None
                    if first:
                        self._away_since = time.monotonic()
                if first:
                    self._warn(
                        f"{self.url} does not answer, requests are repeated for {self.retry_s:.0f} s more: {error}"
                    )
            raise

    def _answered(self) -> None:
        with self._lock:
            since, self._away_since = self._away_since, None
        if since is not None:
            self._warn(f"{self.url} answers again, after {time.monotonic() - since:.1f} s")


@dataclass
class _RetryingReader(ObjectReader):
    """Opens the object again after a failure."""

    _store: RetryingStore
    _open: Callable[[], ObjectReader]

    def __post_init__(self) -> None:
        self._reader: ObjectReader | None = self._store.repeat(self._open)
        self.small_reads = self._reader.small_reads

    def expect(self, offset: int, num_bytes: int, again: bool = True) -> None:
        if self._reader is not None:
            self._reader.expect(offset, num_bytes, again)

    def read(self, offset: int, buffer: memoryview) -> None:
        self._repeat(lambda reader: reader.read(offset, buffer))

    def read_hashed(self, offset: int, buffer: memoryview) -> str:
        return self._repeat(lambda reader: reader.read_hashed(offset, buffer))

    def read_parts(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._repeat(lambda reader: reader.read_parts(offset, buffers))

    def read_once(self, offset: int, num_bytes: int) -> memoryview:
        return self._repeat(lambda reader: reader.read_once(offset, num_bytes))

    def close(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def _repeat(self, read: Callable[[ObjectReader], _T]) -> _T:
        def once() -> _T:
            self._reader = self._reader or self._open()
            try:
                return read(self._reader)
            except StoreUnavailable:
                self.close()
                raise

        return self._store.repeat(once)
