"""The change guard: what samples, counters and storage addresses find; memory that is replaced during a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode

from ckpt import Checkpointer
from ckpt.capture.leaves import Leaves
from ckpt.snapshot import stage
from ckpt.snapshot.guard import (
    EVERYONE,
    ChangeGuard,
    CopyProgress,
    DigestGuard,
    as_moves,
    differ,
    differing,
    move_all,
)
from ckpt.snapshot.handle import SaveHandle
from ckptstore.codecs import fused
from ckptstore.errors import SnapshotTorn
from tests.ckpt.loops import open_run
from tests.ckpt.snapshot.overlapping import guarded, held_copies, returns
from tests.ckpt.snapshot.simulated import plugged_in

PATIENCE_S = 30


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: torch.zeros(600, 100), "odd": lambda: torch.zeros(60_007, dtype=torch.uint8),
    "small": lambda: torch.zeros(16, 16), "transposed": lambda: torch.zeros(600, 100).t(),
    "columns": lambda: torch.zeros(600, 100)[:, 3:40], "scalar": lambda: torch.zeros(()),
}  # fmt: skip


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("element", [0, -1])
def test_a_change_of_the_first_or_last_element_is_found(make: Callable[[], torch.Tensor], element: int) -> None:
    tensor = make()
    guard = guarded(ChangeGuard, tensor)
    assert guard.check(0)
    index = () if not tensor.dim() else (element,) * tensor.dim()
    tensor.data[index] = 1
    assert not guard.check(0)


def test_thousands_of_optimizers_do_not_search_each_others_parts() -> None:
    """An optimizer in backward for each parameter, and leaves that several change or that every one waits for."""
    looked = list[object]()

    class Counted(frozenset[int]):
        def __contains__(self, number: object) -> bool:
            looked.append(number)
            return super().__contains__(number)

    parts = [EVERYONE, *(Counted({number}) for number in range(600)), Counted({7, 8})]
    progress = CopyProgress(parts)
    for number in range(600):
        assert set(progress.parts_of(number)) == {part for part in parts if part >= {number} or not part}
    assert (set(progress.parts_of(600)), progress.parts_of(None)) == ({EVERYONE}, parts)
    assert not looked


@pytest.mark.parametrize(
    "built", [pytest.param(True, marks=pytest.mark.skipif(not fused.IS_BUILT, reason="no library")), False]
)
@given(sizes=st.lists(st.integers(0, 9 << 10), max_size=12), data=st.data())
def test_copies_that_differ_are_found(built: bool, sizes: list[int], data: st.DataObject) -> None:
    """Some places of large ones are compared, or all bytes. At any alignment, beside memory that stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "IS_BUILT", built)
        source, copies = np.arange(1 + sum(sizes), dtype=np.uint32).astype(np.uint8), np.zeros(2 + sum(sizes), np.uint8)
        ends = np.cumsum([0, *sizes])
        moves = as_moves([
            (copies.ctypes.data + 1 + at, source.ctypes.data + at, size)
            for at, size in zip(ends[:-1].tolist(), sizes, strict=True)
        ])  # fmt: skip
        move_all(moves)
        assert (copies[1:-1] == source[:-1]).all()
        assert not copies[-1]
        assert differing(moves, whole=True) == differing(moves, whole=False) == []
        changed = {data.draw(st.integers(0, len(source) - 2)) for _ in range(3)} if sum(sizes) else set()
        source[list(changed)] ^= 1
        of = sorted({int(np.searchsorted(ends, at, "right")) - 1 for at in changed})
        assert differing(moves, whole=True) == of
        found = differing(moves, whole=False)
        assert set(found) <= set(of)
        assert found == [i for i, (to, at, size) in enumerate(moves.tolist()) if differ(to, at, size, whole=False)]
        ended = [i for i in of if {int(ends[i]), int(ends[i + 1]) - 1} & changed or sizes[i] <= 4 << 10]
        assert set(ended) <= set(found), "the first and the last byte, and all of a small one"


@pytest.mark.parametrize("quarter", range(4))
def test_a_change_of_a_quarter_past_the_counter_is_found(quarter: int) -> None:
    tensor = torch.zeros(6000, 60)
    guard = guarded(ChangeGuard, tensor)
    tensor.detach().numpy()[1500 * quarter : 1500 * (quarter + 1)] = 7
    assert guard.changed([0]) == ["t0"]


def test_memory_between_the_elements_does_not_count() -> None:
    whole = torch.zeros(600, 100)
    guard = guarded(ChangeGuard, whole[:, 3:40])
    whole.data[:, :3] = 1
    whole.data[:, 40:] = 1
    assert guard.changed([0]) == []


@pytest.mark.parametrize("kind", [ChangeGuard, DigestGuard])
def test_memory_that_was_replaced_is_a_change_and_is_not_read(kind: Any) -> None:
    tensor = torch.zeros(600, 100)
    guard = guarded(kind, tensor)
    tensor.untyped_storage().resize_(0)
    assert guard.moved(0)
    assert guard.changed([0]) == ["t0"]


@contextmanager
def held_save(folder: Path) -> Iterator[tuple[Checkpointer, nn.ParameterList, SaveHandle, Callable[[], None]]]:
    """A save whose copies begin when the function is called."""
    model = nn.ParameterList(torch.ones(1 << 14) for _ in range(3))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with open_run(folder) as checkpointer, held_copies() as brake:
        checkpointer.prepare(model, optim)
        optim.step()  # the leaves of a device overlap from now on
        yield checkpointer, model, checkpointer.save_async(model, optim, 1), brake.released.set


@pytest.mark.usefixtures("everywhere")
def test_weights_swapped_during_a_copy_and_back_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As averages are that are swapped in for a validation."""
    check = ChangeGuard.check

    def undo_at_once(guard: ChangeGuard, index: int) -> bool:
        unchanged = check(guard, index)
        if not unchanged:
            model[1].data.fill_(1.0)
        return unchanged

    with held_save(tmp_path) as (checkpointer, model, handle, release):
        model[1].data.fill_(2.0)
        monkeypatch.setattr(ChangeGuard, "check", undo_at_once)
        release()
        with pytest.raises(SnapshotTorn, match="model/1"):
            handle.result(PATIENCE_S)
        assert checkpointer.latest() is None


@pytest.mark.usefixtures("everywhere")
def test_memory_that_is_resized_in_the_middle_of_a_copy_is_not_read(tmp_path: Path) -> None:
    """By a call that ckpt does not see."""
    with held_save(tmp_path) as (_, model, handle, release):
        with torch.no_grad():
            model[1].data.resize_(1 << 20)
        release()
        with pytest.raises(SnapshotTorn, match="model/1"):
            handle.result(PATIENCE_S)


def _free(memory: torch.UntypedStorage) -> None:
    data = memory.clone()  # type: ignore[no-untyped-call]
    memory.resize_(0)
    memory.resize_(len(data))
    memory.copy_(data)


REPLACE: dict[str, Callable[[torch.UntypedStorage], object]] = {
    "share": lambda memory: memory.share_memory_(),
    "resize": lambda memory: memory.resize_(2 * len(memory)),
    "free": _free,
}


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("replace", REPLACE.values(), ids=REPLACE)
def test_a_call_that_replaces_memory_waits_until_it_is_copied(
    replace: Callable[[torch.UntypedStorage], object], tmp_path: Path
) -> None:
    with held_save(tmp_path) as (checkpointer, model, handle, release):
        replaced = returns(lambda: replace(model[0].untyped_storage()))
        assert not replaced(0.2)
        release()
        assert replaced(PATIENCE_S)
        handle.result(PATIENCE_S)
        assert torch.equal(checkpointer.load(1)["model/0"], torch.ones(1 << 14))


@pytest.mark.usefixtures("everywhere")
def test_memory_that_is_not_copied_does_not_wait_and_the_methods_of_torch_are_restored(tmp_path: Path) -> None:
    names = ("_share_fd_cpu_", "_share_filename_cpu_", "resize_")
    before = {name: vars(torch.UntypedStorage).get(name) for name in names}
    with held_save(tmp_path) as (checkpointer, _, handle, release):
        torch.ones(5).share_memory_()  # type: ignore[no-untyped-call]
        torch.ones(5).untyped_storage().resize_(100)
        with FakeTensorMode():  # as a compiler traces it
            torch.ones(5).untyped_storage().resize_(100)
        release()
        handle.result(PATIENCE_S)
        checkpointer.wait()
    assert {name: vars(torch.UntypedStorage).get(name) for name in names} == before


def test_memory_that_a_device_copies_in_order_is_not_replaced_before(tmp_path: Path) -> None:
    """A first save overlaps with nothing, but the device is late."""
    with plugged_in(0) as simulated:
        model = nn.ParameterList(torch.full((1 << 15,), 3.0) for _ in range(2))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with open_run(tmp_path) as checkpointer:
            released, handle = simulated.hang(), checkpointer.save_async(model, optim, 1)
            resized = returns(lambda: model[0].untyped_storage().resize_(0))
            assert not resized(0.2)
            released.set()
            assert resized(PATIENCE_S)
            handle.result(PATIENCE_S)
            found = checkpointer.load(1)
        assert [tensor.unique().tolist() for tensor in found.values()] == [[3.0], [3.0]]
        simulated.synchronize()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("whole_bytes", [0, 32 << 20])
@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(600, 100), lambda: torch.zeros(600, 100).t(), lambda: torch.zeros(9)]
)
def test_memory_that_changes_while_the_call_copies_it_is_not_committed(
    make: Callable[[], torch.Tensor], whole_bytes: int, overlap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another process that shares it: one element of a small state, all of a large one."""
    model, check = nn.Module(), stage.Transfer.check
    model.register_buffer("shared", make())
    model.weight = nn.Parameter(torch.zeros(100, 100))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)

    def changed(transfer: stage.Transfer, leaves: Leaves) -> None:
        shared = model.get_buffer("shared").data
        shared.view(-1)[5:6].fill_(1) if whole_bytes and shared.is_contiguous() else shared.fill_(1)
        check(transfer, leaves)

    monkeypatch.setattr(stage, "WHOLE_BYTES", whole_bytes)
    with open_run(tmp_path, overlap=overlap) as run:
        run.save(model, optim, 1)
        with monkeypatch.context() as patched:
            patched.setattr(stage.Transfer, "check", changed)
            with pytest.raises(SnapshotTorn, match="model/shared changed while it was copied"):
                run.save(model, optim, 2)
        assert run.save(model, optim, 3).step == 3
