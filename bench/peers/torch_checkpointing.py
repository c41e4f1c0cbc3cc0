"""Meta's torch_checkpointing: a process that writes, staging that overlaps with training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from bench.measuring import sync_tree
from bench.peers.peer import Peer, copy_optimizer
from bench.state import State


class TorchCheckpointing(Peer):
    """Writes through the page cache, without fsync: we sync."""

    distribution = "torch_checkpointing"
    asynchronous = True

    def __init__(self) -> None:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        writing = CheckpointWriterConfig(file_write_max_threads=2)
        saving = AsyncCheckpointSaverConfig(staging_config=staging, writer_config=writing)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)  # with it torch.save fails: writes are not aligned
        self.manager = CheckpointManager.Config(save=saving, storage_config=storage).build()

    def save(self, state: State, folder: Path) -> None:
        """As start_save, and wait."""
        self.start_save(state, folder)()

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """Staged and written in the background."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        future = self.manager.save(str(folder), state.tree())
        assert future is not None

        def wait() -> None:
            future.result()
            sync_tree(folder)

        return wait

    def before_step(self) -> AbstractContextManager[object]:
        """Its lock prevents steps from changing tensors that are being staged."""
        lock: AbstractContextManager[object] = self.manager.lock()
        return lock

    def load(self, folder: Path, state: State) -> None:
        """Mapped tensors are copied into the live ones."""
        loaded = self.manager.load(str(folder), into=state.tree())
        state.model.load_state_dict(loaded["model"])
        if state.optim is not None:
            copy_optimizer(loaded["optim"], state.optim)

    def close(self) -> None:
        """End its process."""
        self.manager.close()
