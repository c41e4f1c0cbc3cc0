"""Answers about memory that cannot be used: a restore reads from elsewhere, and leaves no descriptor open."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from ckpt import Checkpointer
from ckpt.restoring.fetching import attach
from ckpt.saver import retained_snapshot
from ckpt.saver.messages import Channel
from ckpt.saver.retained_snapshot import HeldSnapshot
from ckptstore.commits.catalog import Checkpoint, State
from ckptstore.names import Attempt, new_ulid
from ckptstore.stores import direct, open_store
from tests.ckpt.saver.retained_train import RUN

CHECKPOINT = Checkpoint(RUN, Attempt(1, new_ulid(1.0)), State.COMMITTED)


@contextmanager
def peer(store: str, answer: Callable[[Channel], None]) -> Iterator[None]:
    """Something that answers where a saver would."""
    path = retained_snapshot.socket_path(store, RUN, "strange")
    path.parent.mkdir(exist_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen()

    def answer_one() -> None:
        channel = Channel(listening.accept()[0], 30.0)
        channel.receive(retained_snapshot.Question)
        answer(channel)
        channel.close()

    thread = threading.Thread(target=answer_one)
    thread.start()
    try:
        yield
        thread.join()
    finally:
        listening.close()
        path.unlink(missing_ok=True)


def held(num_bytes: int) -> HeldSnapshot:
    return HeldSnapshot(str(CHECKPOINT.attempt), {"s0": 0}, num_bytes, [], [], b"", b"")


def test_an_answer_that_cannot_be_used_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, file = f"file://{tmp_path}", tmp_path / "file"
    file.write_bytes(bytes(100))
    with file.open("r+b") as short, file.open("ab") as unreadable:
        cases: dict[str, Callable[[Channel], None]] = {
            "no descriptor came with": lambda channel: channel.send(held(100)),
            "fewer than 200 bytes": lambda channel: channel.send(held(200), fds=[short.fileno()]),
            "cannot map 100 bytes": lambda channel: channel.send(held(100), fds=[unreadable.fileno()]),
        }
        for text, answer in cases.items():
            before = os.listdir("/proc/self/fd")
            caplog.clear()
            with peer(store, answer):
                assert attach(store, CHECKPOINT) is None
            assert text in caplog.text
            assert len(os.listdir("/proc/self/fd")) == len(before)


class NextHeldSnapshot(msgspec.Struct, tag="HeldSnapshot"):
    """As another version of the program might answer."""

    slot: int


def test_an_answer_of_another_version_stops_neither_a_restore_nor_a_save(tmp_path: Path) -> None:
    url = open_store(str(tmp_path / "store")).url
    with peer(url, lambda channel: channel.send(NextHeldSnapshot(1))):
        assert attach(url, CHECKPOINT) is None
    with peer(url, lambda channel: channel.send(NextHeldSnapshot(1))):
        retained_snapshot.release(url, RUN, 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_process_reads_past_the_page_cache_and_several_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    model = torch.nn.Linear(512, 512)
    want = model.weight.detach().clone()
    with Checkpointer(str(tmp_path), run=RUN, group="solo", compress="off") as checkpointer:
        checkpointer.save(model, None, 1)
    (shard,) = tmp_path.rglob("*.ckpt")
    with torch.no_grad():
        model.weight.zero_()
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with shard.open("rb") as file, Checkpointer(str(tmp_path), run=RUN, group="solo") as checkpointer:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if direct.CachedPages(file.fileno()).have(0, want.nbytes) or not direct._set_direct(file.fileno(), True):
            pytest.skip("this file system takes no direct I/O, or is in memory")
        checkpointer.restore(model)
        assert direct.CachedPages(file.fileno()).have(0, want.nbytes) == (ranks > 1)
    assert torch.equal(model.weight, want)
