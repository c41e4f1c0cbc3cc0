"""Processes that look for an orphaned saver."""

from __future__ import annotations

import json
import os
import sys
import threading

from ckpt.saver.lock import try_lock, wait_for_orphans

RUN = "r"
LOCKS = ("testing", "trainer", "saver")
_FORKS = 100


def looks(store: str) -> list[bool]:
    """Whether there was no orphan, of many looks one after the other."""
    return [wait_for_orphans(store, RUN, timeout_s=0.0) for _ in range(200)]


def main(store: str) -> None:
    """Fork while a thread looks; prints the locks that the children hold."""
    stop, (read, write) = threading.Event(), os.pipe()

    def look() -> None:
        while not stop.is_set():
            wait_for_orphans(store, RUN, timeout_s=0.0)

    looking = threading.Thread(target=look)
    looking.start()
    children = []
    for _ in range(_FORKS):
        child = os.fork()
        if not child:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
        children.append(child)
    stop.set()
    looking.join()
    held = []
    for role in LOCKS:
        with try_lock(store, RUN, role) as locked:
            if not locked:
                held.append(role)
    print(json.dumps(held))
    os.close(write)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
