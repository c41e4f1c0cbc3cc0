"""This project behind the interface of the peers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.peer import Peer
from bench.state import State
from ckpt import Checkpointer
from ckptstore.commits.catalog import Checkpoint
from ckptstore.errors import CheckpointHeld
from ckptstore.retention.deletion import delete_checkpoint
from ckptstore.run import Run
from ckptstore.stores import open_store

_LOOK_S = 0.01


class Ours(Peer):
    """One run in a store of its own, in whatever folder states are saved to; one slot unless options say otherwise."""

    distribution = "ckptd"
    asynchronous = True

    def __init__(self, folder: Path, local: bool = False, **options: Any) -> None:
        """local: save in a local tier first, and replicate each save to the other one."""
        self.store = tempfile.mkdtemp(prefix="ckptd-", dir=folder)
        if local:
            options |= {"local": tempfile.mkdtemp(prefix="local-", dir=folder), "local_keep": 1}
        # Benchmarks save the same state again and again, and want all of it written.
        self.checkpointer = Checkpointer(self.store, run="bench", **({"slots": 1, "max_references": 0} | options))
        self.steps = 0
        self.saved: dict[Path, Checkpoint] = {}
        self.discarded: list[Checkpoint] = []

    def save(self, state: State, folder: Path) -> None:
        """As start_save, and wait."""
        self.start_save(state, folder)()

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Durable when it is committed, with a local tier also remote. `folder` only names it."""
        self.steps += 1
        handle = self.checkpointer.save_async(state.model, state.optim, self.steps)

        def wait() -> None:
            self.saved[folder] = handle.result()
            while self.checkpointer.counters.local_only:
                time.sleep(_LOOK_S)

        return wait

    def load(self, folder: Path, state: State) -> None:
        """In place, verified."""
        self.checkpointer.restore(state.model, state.optim, checkpoint=self.saved[folder].id)

    def discard(self, folder: Path) -> None:
        """Free the disk. A run holds the checkpoint it resumed from, so the last one is deleted with the next."""
        self.discarded.append(self.saved.pop(folder))
        store = open_store(self.store)
        for checkpoint in list(self.discarded):
            try:
                delete_checkpoint(Run(store, checkpoint.run), checkpoint.attempt, "bench", force=True)
            except CheckpointHeld:
                continue
            self.discarded.remove(checkpoint)

    def stored_bytes(self, folder: Path) -> int:
        """Stored bytes of the shards."""
        return self.saved[folder].stored_bytes

    def close(self) -> None:
        """End the saver."""
        self.checkpointer.close()
