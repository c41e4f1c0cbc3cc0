"""A daemon whose store notes every delete in a file, and stops itself at one of them.

`python -m tests.ckptd.housekeeping.counted_daemon`, with options of `ckptd serve`. Environment: CKPTD_TEST_NOTES, the
file; CKPTD_TEST_STOP, the place: `before` or `after` a delete, or `never`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from ckptd import logs
from ckptd.app import create_app
from ckptd.redaction import Redactor
from ckptd.server import serve
from ckptd.settings import load
from ckptstore.errors import ObjectMissing
from ckptstore.stores import Store, open_store
from tests.support.stores import Faults, FaultyStore

STOP_AT = 25
_DELETE_S = 0.005


class Noting(FaultyStore):
    """Deletes one key after the other, slowly. A line of the file: process, whether the object was there, key."""

    def __init__(self, store: Store, notes: Path, place: str) -> None:
        super().__init__(store, Faults())
        self.identity = store.identity
        self.one_winner = store.one_winner
        self._notes = notes
        self._place = place
        self._num_deletes = 0

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._num_deletes += 1
            self._stop_at("before")
            there = self._is_there(key)
            self._store.delete_many([key])
            with self._notes.open("a") as notes:
                notes.write(f"{os.getpid()} {there} {key}\n")
            self._stop_at("after")
            time.sleep(_DELETE_S)

    def _is_there(self, key: str) -> bool:
        try:
            self._store.size(key)
        except ObjectMissing:
            return False
        return True

    def _stop_at(self, place: str) -> None:
        if place == self._place and self._num_deletes == STOP_AT:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(0.1)  # the signal may reach another thread first


def main() -> None:
    """Serve until SIGTERM."""
    names = [option.removeprefix("--").replace("-", "_") for option in sys.argv[1::2]]
    settings = load(dict(zip(names, sys.argv[2::2], strict=True)), {}).settings
    logs.configure(settings.log_level, settings.log_format, Redactor([]))
    store = Noting(open_store(settings.store), Path(os.environ["CKPTD_TEST_NOTES"]), os.environ["CKPTD_TEST_STOP"])
    serve(create_app(settings, store), settings)


if __name__ == "__main__":
    main()
