"""Processes that look for an orphaned saver, and children that are forked meanwhile."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable

from ckpt.host.lock import try_lock, wait_for_orphans

RUN = "r"
LOCKS = ("testing", "trainer", "saver")
_FORKS = 100


def looks(store: str) -> list[bool]:
    """Whether there was no orphan, of many looks one after the other."""
    return [wait_for_orphans(store, RUN, timeout_s=0.0) for _ in range(200)]


def forked() -> tuple[int, Callable[[], None]]:
    """A child that has closed what it must not keep, and the call that ends it."""
    (ready, in_child), (until, end) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end)
        os.write(in_child, b"1")
        os.read(until, 1)  # until the parent closes its end
        os._exit(0)
    os.read(ready, 1)
    for fd in (ready, in_child, until):
        os.close(fd)
    return child, lambda: os.close(end)


def main(store: str) -> None:
    """Fork while a thread looks; prints the locks that the children hold."""
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            wait_for_orphans(store, RUN, timeout_s=0.0)

    looking = threading.Thread(target=look)
    looking.start()
    children = [forked() for _ in range(_FORKS)]
    stop.set()
    looking.join()
    held = []
    for role in LOCKS:
        with try_lock(store, RUN, role) as locked:
            if not locked:
                held.append(role)
    print(json.dumps(held))
    for _, end in reversed(children):  # a later child has the pipes of earlier ones
        end()
    for child, _ in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1])
