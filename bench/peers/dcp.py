"""torch.distributed.checkpoint (DCP): save, async_save with a thread or a process, load; with fsync."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from bench.measuring import sync_tree
from bench.peers.peer import Peer
from bench.state import State


class Dcp(Peer):
    """Without a process group."""

    distribution = "torch"

    def save(self, state: State, folder: Path) -> None:
        """DCP syncs its files, we the folders."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        save(state.tensors(), storage_writer=_writer(folder), no_dist=True)
        sync_tree(folder)

    def load(self, folder: Path, state: State) -> None:
        """In place."""
        load(state.tensors(), storage_reader=FileSystemReader(folder), no_dist=True)


class DcpThread(Dcp):
    """async_save in a thread; staging overlaps with training and is awaited before the next optimizer step."""

    asynchronous = True
    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD

    def __init__(self) -> None:
        shared = self.kind is AsyncCheckpointerType.PROCESS
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=shared, use_async_staging=True, use_non_blocking_copy=False
            )
        )
        self.staging: Any = None

    def save(self, state: State, folder: Path) -> None:
        """As start_save, and wait."""
        self.start_save(state, folder)()

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """The stager reuses its memory from save to save."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        response: Any = async_save(
            state.tensors(), storage_writer=_writer(folder), async_checkpointer_type=self.kind,
            async_stager=self.stager, no_dist=True,
        )  # fmt: skip
        self.staging = response.staging_completion

        def wait() -> None:
            response.upload_completion.result()
            sync_tree(folder)

        return wait

    @contextmanager
    def _staged(self) -> Iterator[None]:
        if self.staging is not None:
            self.staging.result()
            self.staging = None
        yield

    def before_step(self) -> AbstractContextManager[object]:
        """Weights must not change before they are staged."""
        return self._staged()

    def close(self) -> None:
        """Free the staged copy."""
        self.stager.close()


class DcpProcess(DcpThread):
    """async_save in a process. For its first save it wants a process group in this one, if only of one rank."""

    kind = AsyncCheckpointerType.PROCESS

    def start_save(self, state: State, folder: Path) -> Callable[[], None]:
        """The first call starts the process, and returns when that save is durable."""
        if _async_process_executor._CHECKPOINT_PROCESS is not None:
            return super().start_save(state, folder)
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            super().start_save(state, folder)()
        finally:
            dist.destroy_process_group()
        return lambda: None


def _writer(folder: Path) -> FileSystemWriter:
    return FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, thread_count=2)
