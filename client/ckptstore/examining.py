"""Examining a store: does it keep the promises that checkpoints rest on, and how fast is it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ckptstore import names
from ckptstore.clock import Clock
from ckptstore.daemon.wire import ProbeBody, ProbeCheck
from ckptstore.errors import CkptError, ObjectMissing, StoreUnavailable
from ckptstore.names import new_ulid
from ckptstore.probing import Probe, probe_store
from ckptstore.stores import Store

_SKEW_ALLOWED_S = 60.0
_DATA = bytes(range(256)) * 256


def examine(store: Store, clock: Clock) -> ProbeBody:
    """Write, read, list, race for and delete some small objects. A store that does not answer fails the checks."""
    examination = _Examination(store, clock)
    checks = list(examination.run())
    once = [check for check in checks if check.name in ("create once", "one winner")]
    return ProbeBody(
        store=store.url,
        ok=all(check.ok for check in checks),
        conditional_writes=bool(once) and all(check.ok for check in once),
        clock_skew_s=examination.skew_s,
        presigned_urls=store.presign(names.PROBES_PREFIX + "x", 60) is not None,
        checks=checks,
    )


class _Examination:
    def __init__(self, store: Store, clock: Clock) -> None:
        self.skew_s: float | None = None
        self._store = store
        self._clock = clock
        self._probe: Probe | None = None
        self._folder = f"{names.PROBES_PREFIX}{new_ulid(clock())}/"

    def run(self) -> Iterator[ProbeCheck]:
        steps: dict[str, Callable[[], str]] = {
            "write": self._write,
            "read": self._read,
            "read a range": self._read_range,
            "list": self._list,
            "create once": self._create_twice,
            "one winner": self._race,
            "clock": self._look_at_clock,
            "delete": self._delete,
        }
        try:
            for name, step in steps.items():
                yield self._check(name, step)
        finally:
            with _forgiving():
                self._store.delete_many([info.key for info in self._store.list(self._folder)])

    def _check(self, name: str, step: Callable[[], str]) -> ProbeCheck:
        began = time.perf_counter()
        try:
            problem = step()
        except CkptError as error:
            problem = str(error)
        return ProbeCheck(name=name, ok=not problem, seconds=time.perf_counter() - began, detail=problem)

    def _write(self) -> str:
        self._store.put(self._folder + "object", _DATA)
        return ""

    def _read(self) -> str:
        return "" if self._store.get(self._folder + "object") == _DATA else "what was written reads differently"

    def _read_range(self) -> str:
        buffer = memoryview(bytearray(1000))
        self._store.get_range(self._folder + "object", 500, buffer)
        return "" if bytes(buffer) == _DATA[500:1500] else "a range holds other bytes than the whole"

    def _list(self) -> str:
        listed = {info.key: info.bytes for info in self._store.list(self._folder)}
        return "" if listed == {self._folder + "object": len(_DATA)} else f"a listing shows {listed}"

    def _create_twice(self) -> str:
        self._probe = probe_store(self._store, self._clock)
        return "" if self._probe.refuses_second else "a second create of the same object was accepted"

    def _race(self) -> str:
        return "" if self._probed().one_wins else "not one of several concurrent creators of an object won"

    def _look_at_clock(self) -> str:
        self.skew_s = self._probed().skew_s
        far = abs(self.skew_s) > _SKEW_ALLOWED_S
        return f"the store's clock is {self.skew_s:+.0f} s from this machine's" if far else ""

    def _probed(self) -> Probe:
        if self._probe is None:
            raise StoreUnavailable("this could not be tried", "See the check before it")
        return self._probe

    def _delete(self) -> str:
        self._store.delete_many([self._folder + "object"])
        try:
            self._store.get(self._folder + "object")
        except ObjectMissing:
            return ""
        return "an object can be read after it was deleted"


@contextmanager
def _forgiving() -> Iterator[None]:
    try:
        yield
    except CkptError:
        pass  # the checks have said what is wrong
