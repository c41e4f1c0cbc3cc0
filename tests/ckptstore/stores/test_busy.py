"""The time that writing takes in the background."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ckptstore.stores import open_store
from ckptstore.stores.busy import BusyTime
from ckptstore.stores.direct import PACK_BYTES


def test_what_overlaps_counts_once() -> None:
    busy = BusyTime()
    together = threading.Barrier(3)

    def work() -> None:
        with busy:
            together.wait()
            time.sleep(0.05)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    together.wait()
    assert busy.seconds == 0.0, "nothing has ended"
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    first = busy.seconds
    assert 0.04 <= first <= time.perf_counter() - started + 0.04
    with busy:
        pass
    assert first <= busy.seconds < first + 0.04


def test_a_local_file_is_written_while_nobody_waits(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with store.open_writer("folder/file", 3 * PACK_BYTES) as writer:
        for _ in range(3):
            written = writer.busy_s
            writer.write(bytes(PACK_BYTES))
        deadline = time.monotonic() + 60
        while writer.busy_s == written and time.monotonic() < deadline:
            time.sleep(0.01)
        assert writer.busy_s > written, "it goes on by itself"
    assert store.size("folder/file") == 3 * PACK_BYTES
