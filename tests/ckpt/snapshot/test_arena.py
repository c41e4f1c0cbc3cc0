from __future__ import annotations

import logging
import multiprocessing
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ckpt import Checkpointer
from ckpt.host import segment as segments
from ckpt.host.segment import Segment, posix_shared_memory
from ckpt.saver.messages import Forget, Slot
from ckpt.snapshot import arena as arenas
from ckpt.snapshot import stage
from ckpt.snapshot.arena import Arena
from tests.ckpt.snapshot.simulated import plugged_in
from tests.support.training import same_state
from tests.support.waiting import open_files, present, wait_until


class Announced:
    """The slots that an arena has announced, and no longer those that are gone."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def __call__(self, change: Slot | Forget, segment: Segment | None) -> None:
        if isinstance(change, Slot):
            self.known.append(change.number)
        else:
            self.known.remove(change.slot)


def test_slots_are_reused_grow_with_the_state_and_wait_when_all_are_in_use() -> None:
    announced = Announced()
    arena = Arena(2, announced)
    first, second = present(arena.acquire(1000)), present(arena.acquire(1000))
    assert arena.acquire(1000) is None
    arena.release(first)
    assert arena.acquire(500) is first
    arena.release(first)
    larger = present(arena.acquire(5000))
    assert (larger.segment.num_bytes, announced.known) == (5000, [second.number, larger.number])
    arena.release(second)
    arena.release(larger)
    assert arena.acquire(5000) is larger
    assert arena.acquire(5000) is not None
    assert arena.acquire(5000) is None
    threading.Timer(0.1, arena.release, (larger,)).start()
    assert arena.released.wait(10)
    assert arena.acquire(5000) is larger
    arena.close()


def test_a_whole_save_over_posix_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_ANONYMOUS", posix_shared_memory)
    model, other = nn.Linear(512, 512), nn.Linear(512, 512)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 0)
        checkpointer.restore(other)
    assert same_state(dict(other.state_dict()), dict(model.state_dict()))


def arena_descriptors() -> int:
    return sum("ckpt-arena" in link for link in open_files().values())


class Spy(torch.utils.data.Dataset[torch.Tensor]):
    """Returns, from inside a worker, which parts of the arena it holds."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        maps = Path("/proc/self/maps").read_text()
        return torch.tensor(["ckpt-arena" in maps, arena_descriptors() > 0])


def test_data_loader_workers_hold_nothing_of_the_arena(tmp_path: Path) -> None:
    model = nn.Linear(512, 512)
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 0)
        assert "ckpt-arena" in Path("/proc/self/maps").read_text()
        loader = DataLoader(Spy(), batch_size=1, num_workers=2, multiprocessing_context="fork")
        assert not torch.cat(list(loader)).any()
        checkpointer.save(model, None, 1)
        other = nn.Linear(512, 512)
        checkpointer.restore(other)
        assert same_state(dict(other.state_dict()), dict(model.state_dict()))


def test_a_fork_cannot_use_or_close_the_parents_checkpointer(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)

    def child(queue: multiprocessing.queues.Queue[str]) -> None:
        checkpointer.close()
        try:
            checkpointer.save_async(model, None, 1)
        except Exception as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    with Checkpointer(str(tmp_path), run="r") as checkpointer:
        checkpointer.save(model, None, 0)
        queue: multiprocessing.queues.Queue[str] = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert "belongs to another process" in queue.get(timeout=60)
        process.join()
        assert checkpointer.save(model, None, 1).step == 1


def test_everything_is_given_back_on_close(tmp_path: Path) -> None:
    def footprint() -> tuple[int, int]:
        return len(open_files()), threading.active_count()

    def cycle() -> None:
        with Checkpointer(str(tmp_path), run="r") as checkpointer:
            checkpointer.save(nn.Linear(64, 64), None, 0)

    def grown() -> bool:
        return any(now > then for now, then in zip(footprint(), before, strict=True))

    cycle()
    before = footprint()  # threads of earlier tests may still be ending, so that less may be left later
    for _ in range(2):
        cycle()
    wait_until(lambda: not grown(), "everything to be given back")


def test_a_slot_that_cannot_be_made_in_the_background_is_made_by_a_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the error is."""
    arena = Arena(2, Announced())
    first = arena.acquire(1000)
    with monkeypatch.context() as broken:
        broken.setattr(arenas, "populate", Mock(side_effect=AttributeError("pci_domain_id")))
        arena.prepare_rest()
        assert arena._background is not None
        arena._background.join()
    assert "pci_domain_id" in caplog.text
    second = arena.acquire(1000)
    assert first is not None is not second
    arena.close()


def test_pinning_beside_training_leaves_time_for_every_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the host: the driver blocks all of them. Nothing is launched during `prepare`."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    ranks: list[int] = []
    monkeypatch.setattr(stage, "pin_segment", lambda segment, device, of_host: ranks.append(of_host))
    with plugged_in(0), caplog.at_level(logging.INFO, "ckpt"):
        for prepare in (True, False):
            arena = Arena(2, Announced())
            arena.expect(1000, torch.device("cpu"), wait=prepare)
            arena.join()
            arena.close()
            assert ranks == [0 if prepare else 8] * 2
            assert ("prepare()" in caplog.text) is not prepare
            ranks.clear()


def test_wait_returns_when_no_memory_is_pinned_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning would end the capture of a CUDA graph that follows."""
    populated, making = threading.Event(), threading.Event()
    populate = segments.populate

    def slowly(segment: Segment) -> None:
        if threading.current_thread().name == "ckpt-arena":
            making.set()
            populated.wait()
        populate(segment)

    monkeypatch.setattr(arenas, "populate", slowly)
    model = nn.Linear(4, 4)
    with Checkpointer(str(tmp_path), run="r", slots=2, writer="thread") as checkpointer:
        checkpointer.save_async(model, None, 1)
        making.wait()
        waiting = threading.Thread(target=checkpointer.wait)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        populated.set()
        waiting.join()


def test_extra_memory_is_one_state_per_slot(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False)  # 64 MiB
    with Checkpointer(str(tmp_path), run="r", slots=1) as checkpointer:
        for step in range(3):
            checkpointer.save(model, None, step)
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert [s.num_bytes for s in present(checkpointer._saves.client).arena.segments.values()] == [size]
        assert checkpointer.saver_pid is not None
        status = Path(f"/proc/{checkpointer.saver_pid}/status").read_text()
        peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) << 10
    # The saver's peak holds the slot once more because it maps the same memory.
    assert peak - size < 256 << 20


def test_what_is_prepared_has_room_for_tensors_of_plain_values(tmp_path: Path) -> None:
    model, own, shared = nn.Linear(300, 300), torch.rand(100_000), [torch.rand(50_000), torch.rand(5)]
    with Checkpointer(str(tmp_path), run="r", writer="thread", slots=1) as checkpointer:
        checkpointer.prepare(model, None, own={"x": own}, shared={"all": shared})
        prepared = present(checkpointer._saves.client).arena.segments
        assert len(prepared) == 1
        checkpointer.save(model, None, 1, own={"x": own}, shared={"all": shared})
        assert present(checkpointer._saves.client).arena.segments == prepared  # and no other was needed
