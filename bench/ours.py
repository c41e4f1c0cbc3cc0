"""This project behind the interface of the peers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.peer import Peer
from bench.state import State
from ckpt import Checkpointer
from ckptstore.catalog import Checkpoint
from ckptstore.clock import system_clock
from ckptstore.deletion import delete_checkpoint
from ckptstore.stores import open_store


class Ours(Peer):
    """One run in a store of its own, in whatever folder states are saved to; one slot unless options say otherwise."""

    distribution = "ckptd"
    asynchronous = True

    def __init__(self, folder: Path, **options: Any) -> None:
        self.store = tempfile.mkdtemp(prefix="ckptd-", dir=folder)
        self.checkpointer = Checkpointer(self.store, run="bench", **({"slots": 1} | options))
        self.steps = 0
        self.saved: dict[Path, Checkpoint] = {}

    def save(self, state: State, folder: Path) -> None:
        """As start_save, and wait."""
        self.start_save(state, folder)()

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Durable when it is committed. `folder` only names it."""
        self.steps += 1
        handle = self.checkpointer.save_async(state.model, state.optim, self.steps)

        def wait() -> None:
            self.saved[folder] = handle.result()

        return wait

    def load(self, folder: Path, state: State) -> None:
        """In place, verified."""
        self.checkpointer.restore(state.model, state.optim, checkpoint=self.saved[folder].id)

    def discard(self, folder: Path) -> None:
        """Free the disk at once."""
        delete_checkpoint(open_store(self.store), self.saved.pop(folder), "bench", system_clock)

    def stored_bytes(self, folder: Path) -> int:
        """Of the shards."""
        return self.saved[folder].stored_bytes

    def close(self) -> None:
        """End the saver."""
        self.checkpointer.close()
