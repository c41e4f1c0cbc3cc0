from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.host import segment as segments
from ckpt.host.segment import Segment, memfd, populate, posix_shared_memory
from tests.ckpt.snapshot.test_arena import arena_descriptors


@pytest.mark.parametrize("make", [memfd, posix_shared_memory])
def test_memory_is_shared_through_the_descriptor_and_has_no_name(
    make: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_ANONYMOUS", make)
    one = Segment(10_000)
    assert os.fstat(one.fd).st_nlink == 0
    assert not os.get_inheritable(one.fd)
    two = Segment(10_000, os.dup(one.fd))
    populate(one)
    one.view[9_999] = 7
    assert two.view[9_999] == 7
    one.close()
    two.close()


@pytest.mark.parametrize("setting", ["[advise]", "[never]", None])
def test_all_pages_are_there_after_populate(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones where the system gives them to those that ask: here whatever it is said to do."""
    monkeypatch.setattr(segments, "_LARGE_PAGES", tmp_path / "shmem_enabled")
    if setting is not None:
        (tmp_path / "shmem_enabled").write_text(f"always within_size {setting} deny force")
    num_bytes = 4 << 20
    one = Segment(num_bytes)
    assert os.fstat(one.fd).st_blocks == 0
    populate(one)
    assert os.fstat(one.fd).st_blocks * 512 == num_bytes
    one.close()


@pytest.mark.parametrize("system", ["hardened", "before 6.3"])
def test_hardened_and_old_systems_have_shared_memory(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vm.memfd_noexec=2 requires a flag that old ones do not know."""
    memfd_create = os.memfd_create

    def create(name: str, flags: int) -> int:
        if (flags & 8 == 0) == (system == "hardened"):
            raise OSError(errno.EACCES if system == "hardened" else errno.EINVAL, "no")
        return memfd_create(name, flags & ~8)

    monkeypatch.setattr(os, "memfd_create", create)
    os.close(memfd())


def test_a_segment_that_is_forgotten_or_closed_twice_leaves_no_descriptor_in_children() -> None:
    before = arena_descriptors()
    Segment(100)
    assert arena_descriptors() == before
    segments = [Segment(100) for _ in range(8)]
    os.close(segments[3].fd)  # the order in which a child closes them is not known
    context = multiprocessing.get_context("fork")
    left: multiprocessing.queues.Queue[int] = context.Queue()
    process = context.Process(target=lambda: left.put(arena_descriptors()))
    process.start()
    segments[3].fd = -1
    assert left.get(timeout=60) == 0
    process.join(60)


def test_resources_of_a_fork_are_closed_without_touching_the_parent() -> None:
    segment = Segment(100)
    assert segment in segments._after_fork
    pid = os.fork()
    if pid == 0:
        os._exit(0 if segment.fd == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    segment.view[0] = 1
    segment.close()
