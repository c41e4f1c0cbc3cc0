"""The time that writing takes in the background."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptstore.stores import busy as busy_module
from ckptstore.stores import open_store
from ckptstore.stores.busy import BusyTime
from ckptstore.stores.direct import PACK_BYTES
from tests.support.waiting import wait_until


def test_what_overlaps_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(busy_module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    busy = BusyTime()
    with busy:
        now[0] = 1.0
        with busy:  # as from another thread
            now[0] = 3.0
        assert busy.seconds == 0.0, "nothing has ended"
        now[0] = 6.0
    assert busy.seconds == 6.0
    now[0] = 100.0
    with busy:
        now[0] = 104.0
    assert busy.seconds == 10.0


def test_a_local_file_is_written_in_the_background(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with store.open_writer("folder/file", 3 * PACK_BYTES) as writer:
        for _ in range(3):
            written = writer.busy_s
            writer.write(bytes(PACK_BYTES))
        wait_until(lambda: writer.busy_s > written, "writing in the background")
    assert store.size("folder/file") == 3 * PACK_BYTES
