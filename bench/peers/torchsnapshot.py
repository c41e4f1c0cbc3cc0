"""torchsnapshot: take, async_take, restore."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchsnapshot

from bench.measuring import sync_tree
from bench.peers.peer import Peer
from bench.state import State


class TorchSnapshot(Peer):
    """Writes through the page cache, without fsync: we sync."""

    distribution = "torchsnapshot"
    asynchronous = True

    def save(self, state: State, folder: Path) -> None:
        """Without a copy."""
        torchsnapshot.Snapshot.take(str(folder), _objects(state))
        sync_tree(folder)

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Copied on the training thread, written in another."""
        pending = torchsnapshot.Snapshot.async_take(str(folder), _objects(state))

        def wait() -> None:
            pending.wait()
            sync_tree(folder)

        return wait

    def load(self, folder: Path, state: State) -> None:
        """In place."""
        torchsnapshot.Snapshot(str(folder)).restore(_objects(state))


def _objects(state: State) -> dict[str, Any]:
    return {"model": state.model} | ({} if state.optim is None else {"optim": state.optim})
