"""A store in a dict and a clock that only moves when a test says so. The store's times are its own clock's."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ckptstore.codecs.chunk_codecs import Buffer
from ckptstore.errors import ObjectMissing
from ckptstore.stores import ObjectInfo, ObjectWriter, Store


@dataclass
class FakeClock:
    """Stands still. Jumps do not reach the store: they are the fault of one machine."""

    now: float = 1_700_000_000.0
    jump_s: float = 0.0

    def __call__(self) -> float:
        return self.now + self.jump_s

    def true_time(self) -> float:
        """What the store goes by."""
        return self.now


class DictStore(Store):
    """Keeps every promise of a store, and its objects in memory."""

    creates_by_itself = True

    def __init__(self, clock: FakeClock) -> None:
        self.url = self.identity = "dict://"
        self._clock = clock
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer) -> None:
        with self._lock:
            self._objects[key] = (bytes(data), self._clock.true_time())

    def put_if_absent(self, key: str, data: Buffer) -> bool:
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = (bytes(data), self._clock.true_time())
            return True

    def open_writer(self, key: str, size_hint: int = 0) -> ObjectWriter:
        return self.open_replacement(key, size_hint)  # one put of all bytes

    def get(self, key: str) -> bytes:
        try:
            return self._objects[key][0]
        except KeyError:
            raise ObjectMissing(f"{key} does not exist") from None

    def read_into(self, key: str, offset: int, buffer: memoryview) -> int:
        data = self.get(key)[offset : offset + len(buffer)]
        buffer[: len(data)] = data
        return len(data)

    def size(self, key: str) -> int:
        return len(self.get(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        return iter([ObjectInfo(key, len(data), at) for key, (data, at) in found])

    def list_folders(self, prefix: str) -> Iterator[str]:
        rest = [info.key.removeprefix(prefix) for info in self.list(prefix)]
        return iter(sorted({key.split("/")[0] for key in rest if "/" in key}))

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            with self._lock:
                self._objects.pop(key, None)
