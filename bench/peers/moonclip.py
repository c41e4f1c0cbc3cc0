"""moonclip: deltas and zstd in a background thread of Rust."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moonclip import CheckpointManager

from bench.measuring import sync_tree
from bench.peers.peer import Peer
from bench.state import State


class Moonclip(Peer):
    """A manager for each folder: each save is a whole one. It syncs its files."""

    distribution = "moonclip"
    asynchronous = True

    def save(self, state: State, folder: Path) -> None:
        """As start_save, and wait."""
        self.start_save(state, folder)()

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Copied on the training thread."""
        manager = CheckpointManager(str(folder))
        manager.save(1, model=state.model, optimizer=state.optim)

        def wait() -> None:
            manager.flush()
            sync_tree(folder)

        return wait

    def load(self, folder: Path, state: State) -> None:
        """Into the live objects."""
        manager = CheckpointManager(str(folder))
        manager.load_latest(model=state.model, optimizer=state.optim)
