"""Saves without a copy, where the host has no memory for a snapshot: the same bytes, of the state at the call."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.leaves import Change, Leaves
from ckpt.saver import pipeline
from ckpt.snapshot.live import LiveState
from ckpt.snapshot.stage import SnapshotLayout
from ckptstore.errors import SaveFailed, SnapshotTorn, StoreUnavailable
from ckptstore.format.shards import Slice
from ckptstore.stores import open_store
from tests.ckpt.snapshot.simulated import add_one, plugged_in
from tests.support.stores import Faults, FaultyStore
from tests.support.training import same_state
from tests.support.waiting import wait_until


class Mixed(nn.Module):
    """Of several types, in memory that is not contiguous, and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3_000_003))
        self.turned = nn.Parameter(torch.randn(1500, 1100).t())
        self.bf16 = nn.Parameter(torch.randn(500_001).to(torch.bfloat16))
        self.small = nn.ParameterList(torch.randn(n) for n in range(1, 40))
        self.tied = self.weight
        self.register_buffer("flags", torch.rand(300_000) > 0.5)
        self.register_buffer("nothing", torch.empty(0, 3))


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of one of a billion ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000000")


def shards(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(store.glob("r/attempts/*/*.ckpt"))]


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_the_same_bytes_are_stored_and_the_reason_is_logged_once(
    writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Mixed()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("copied", "live"):
        if name == "live":
            monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000000")
        # Statistics name the attempt.
        with Checkpointer(str(tmp_path / name), run="r", writer=writer, max_references=0, statistics=False) as run:
            for step in (1, 2):
                handle = run.save_async(model, optim, step)
                assert name == "copied" or handle.staged()
            assert handle.result(60).step == 2
    assert shards(tmp_path / "live") == shards(tmp_path / "copied")
    logged = [record.getMessage() for record in caplog.records if "copies nothing" in record.getMessage()]
    assert len(logged) == 1
    assert "of host memory, and" in logged[0]


@pytest.mark.usefixtures("no_memory")
def test_the_state_is_that_of_the_call_and_unchanged_chunks_are_referenced(tmp_path: Path) -> None:
    model = nn.ParameterDict({"frozen": torch.randn(1_000_000), "trained": torch.randn(1_000_000)})
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(str(tmp_path), run="r", compress="off") as run:
        run.prepare(model, optim)
        saved, states = [], []
        for step in range(3):
            saved.append(run.save_async(model, optim, step))
            states.append({f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()})
            model["trained"].data.add_(1)
        assert [handle.result(60).referenced_bytes for handle in saved] == [0, 4_000_000, 4_000_000]
        assert run.saver_pid is None
        for step, state in enumerate(states):
            assert same_state(run.load(step, "model/*"), state)


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("retry_s", [0.0, 60.0])
def test_a_failed_upload_is_repeated_or_raised(retry_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, model = Faults(), Mixed()
    monkeypatch.setattr(
        pipeline, "open_store", lambda *args, **kwargs: FaultyStore(open_store(*args, **kwargs), faults)
    )
    with Checkpointer(str(tmp_path), run="r", writer="thread", max_references=0, retry_s=retry_s) as run:
        run.save(model, None, 1)
        faults.fail_at = len(faults.calls) + 2
        assert run.save_async(model, None, 2).staged() == bool(retry_s)
        if not retry_s:
            with pytest.raises(StoreUnavailable, match=r"write .* injected"):
                run.save_async(model, None, 3)
        assert run.save(model, None, 4).step == 4


@pytest.mark.usefixtures("no_memory")
def test_an_interrupted_save_stores_nothing_changed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read, main = threading.Semaphore(0), LiveState.__getitem__, threading.get_ident()

    def called() -> set[str]:
        return {frame.f_code.co_name for frame, _ in traceback.walk_stack(sys._current_frames()[main])}

    def interrupt_the_first(state: LiveState, part: slice) -> memoryview:
        if reads.acquire(blocking=False):
            wait_until(lambda: {"wait_staged", "wait"} <= called())
            signal.pthread_kill(main, signal.SIGINT)
            while not state._closed:
                threading.Event().wait(0.01)
        return read(state, part)

    monkeypatch.setattr(LiveState, "__getitem__", interrupt_the_first)
    model = Mixed()
    with Checkpointer(str(tmp_path), run="r") as run:
        run.save(model, None, 1)
        reads.release()
        with pytest.raises(KeyboardInterrupt):
            run.save_async(model, None, 2)
        with pytest.raises(SaveFailed, match="interrupted"):
            run.wait()
        assert run.save(model, None, 3).step == 3


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("changed", ["weight", "turned"])
def test_what_another_thread_or_process_changes_meanwhile_is_not_committed(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read, armed = Mixed(), LiveState.__getitem__, threading.Event()

    def read_then_change(state: LiveState, part: slice) -> memoryview:
        data = read(state, part)
        if armed.is_set():  # through numpy, as in another process: no version counter moves
            value = model.state_dict()[changed].numpy()
            value[(0,) * value.ndim] = not value.flat[0]
            armed.clear()
        return data

    monkeypatch.setattr(LiveState, "__getitem__", read_then_change)
    with Checkpointer(str(tmp_path), run="r", retry_s=0) as run:
        run.save(model, None, 1)
        armed.set()
        with pytest.raises(SnapshotTorn, match=f"model/{changed} changed while it was uploaded"):
            run.save(model, None, 2)
        state = {f"model/{name}": tensor.clone() for name, tensor in model.state_dict().items()}
        assert run.save(model, None, 3).step == 3
        assert [found.step for found in run._source.checkpoints("r")] == [3, 1]
        assert same_state(run.load(3, "model/*"), state)


@given(st.data())
def test_any_range_of_any_tensor_is_read(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=5))
    tensors, slices = [], []
    for number, shape in enumerate(shapes):
        order = data.draw(st.permutations(range(len(shape))))
        whole = torch.randn([2 * size for size in shape]).permute(order)
        tensors.append(whole[tuple(slice(None, None, data.draw(st.integers(1, 2))) for _ in shape)])
        slices.append(Slice.whole(f"t{number}", "float32", tuple(tensors[-1].shape)))
    layout = SnapshotLayout.of(slices)
    state = LiveState(Leaves(slices, tensors, tensors, [Change.ANY_TIME] * len(tensors)), layout)
    expected = b"".join(tensors[i].contiguous().numpy().tobytes() for i in layout.order)
    begin = 4 * data.draw(st.integers(0, len(expected) // 4))
    end = 4 * data.draw(st.integers(begin // 4, len(expected) // 4))
    if begin < end:
        assert state[begin:end] == expected[begin:end]


@pytest.mark.usefixtures("no_memory")
@pytest.mark.parametrize("seed", range(3))
def test_work_that_a_device_has_queued_comes_first(seed: int, tmp_path: Path) -> None:
    with plugged_in(seed) as simulated:
        model, buffer = nn.Module(), simulated.tensor(5.0)
        model.register_buffer("average", buffer)
        with Checkpointer(str(tmp_path), run="r", writer="thread") as run:
            for _ in range(8):
                simulated.launch(add_one(buffer))
            run.save_async(model, None, 1).result(60)
            assert run.load(1)["model/average"].unique().tolist() == [13.0]
        simulated.synchronize()
