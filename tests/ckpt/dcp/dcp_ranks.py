"""A rank that saves and loads through torch.distributed.checkpoint: `dcp_ranks FOLDER`. Prints what held.

One set of processes runs all scenarios, in runs of their own: starting them takes longer than what they do.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt.dcp import StorageReader, StorageWriter
from ckptstore.names import Reference
from ckptstore.reading.source import StoreSource
from ckptstore.stores import open_store
from tests.ckpt.dcp_state import dcp, flat_optimizer_state, full, make_model, make_optimizer, same
from tests.ckpt.ddp import join
from tests.support.stores import Faults, FaultyStore
from tests.support.training import seed_all
from tests.support.waiting import wait_until


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer under FSDP2, with the values of the unsharded ones."""
    model = make_model(seed)
    for layer in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(layer)
    return model, make_optimizer(model)


def state_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": flat_optimizer_state(model, optim)}


def round_trip(folder: str, rank: int) -> None:
    """Sync, async in a thread, async in a process: each step holds what it was given when it was saved."""
    model, optim = sharded(1)
    before = full(state_of(model, optim))
    objects = {"seen": 17, f"only_{rank}": b"bytes", "groups": [{"lr": 0.1}, {"lr": 0.2}], "order": [3, 1, 2]}
    writer = StorageWriter(folder, run="fsdp")
    metadata = dcp.save({**state_of(model, optim), "objects": objects}, storage_writer=writer, checkpoint_id="1")
    assert metadata.storage_meta is not None
    assert str(metadata.storage_meta.checkpoint_id).startswith("fsdp@1.")
    for step, kind in ((2, AsyncCheckpointerType.THREAD), (3, AsyncCheckpointerType.PROCESS)):
        response = dcp.async_save(
            state_of(model, optim), storage_writer=writer, checkpoint_id=str(step), async_checkpointer_type=kind
        )
        with torch.no_grad():
            next(model.parameters()).zero_()  # the next step of training does not wait
        response.result()
        with torch.no_grad():
            model, optim = sharded(1)
    for step in (1, 2, 3):
        other, its_optim = sharded(2)
        state = state_of(other, its_optim)
        assert not same(full(state), before)
        dcp.load(state, storage_reader=StorageReader(folder, run="fsdp", checkpoint=step))
        assert same(full(state), before), step
    loaded = {"objects": {"seen": 0, f"only_{rank}": b"", "groups": [{"lr": 0.0}, {"lr": 0.0}], "order": []}}
    dcp.load(loaded, storage_reader=StorageReader(folder, run="fsdp", checkpoint=1))
    assert loaded == {"objects": objects}


def from_single(folder: str, rank: int) -> None:
    """What a Checkpointer of one process saved is loaded by two ranks, through DCP."""
    model, optim = sharded(2)
    state = state_of(model, optim)
    dcp.load(state, storage_reader=StorageReader(folder, run="single"))
    expected = make_model(1)
    its_optim = make_optimizer(expected)
    assert same(full(state["model"]), dict(expected.state_dict()))
    assert same(full(state["optim"]), flat_optimizer_state(expected, its_optim))


def resharded(folder: str, rank: int) -> None:
    """Any placement is loaded into any other; of replicas one is stored."""
    mesh, grid = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    whole = torch.arange(35.0).reshape(7, 5)
    placements: list[tuple[Any, list[Any]]] = [
        (mesh, [Shard(0)]), (mesh, [Shard(1)]), (mesh, [Replicate()]), (grid, [Replicate(), Shard(1)])
    ]  # fmt: skip
    saved: dict[str, Any] = {str(i): distribute_tensor(whole, *each) for i, each in enumerate(placements)}
    saved["old"] = sharded_tensor(whole, rank)
    dcp.save(saved, storage_writer=StorageWriter(folder, "dtensors", 1))
    stored = StoreSource(open_store(folder)).find(Reference("dtensors", 1))
    assert stored.raw_bytes == len(saved) * whole.nbytes
    reader = StorageReader(folder, run="dtensors")
    for each in placements:
        state: dict[str, Any] = {name: distribute_tensor(torch.zeros(7, 5), *each) for name in saved}
        dcp.load(state, storage_reader=reader)
        assert all(torch.equal(tensor.full_tensor(), whole) for tensor in state.values()), each
    state = {"0": sharded_tensor(torch.zeros(7, 5), rank)}
    with warnings.catch_warnings(action="ignore"):  # torch deprecates the class
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["0"].local_tensor(), whole[:3] if rank == 0 else whole[3:])


def sharded_tensor(whole: torch.Tensor, rank: int) -> Any:
    """A ShardedTensor: three rows on rank 0, the rest on rank 1."""
    start, stop = (0, 3) if rank == 0 else (3, 7)
    shard = LocalShard.from_tensor_and_offsets(whole[start:stop].clone(), [start, 0], rank)
    return init_from_local_shards([shard], *whole.shape)


class FailingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        raise OSError(errno.EIO, "the device is broken")


class ForgetfulWriter(StorageWriter):
    """Reports one item less than it wrote, as a lost worker thread would."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        future = super().write_data(plan, planner)
        shortened: Any = torch.futures.Future()
        shortened.set_result(future.wait()[:-1])
        return shortened


def failures(folder: str, rank: int) -> None:
    """What fails on one rank fails on all, and commits nothing."""
    state = state_of(*sharded(1))
    broken = FaultyStore(open_store(folder), Faults(fail_at=0)) if rank == 1 else folder
    forgetful = ForgetfulWriter if rank == 1 else StorageWriter
    cases: list[tuple[str, int, StorageWriter, Any]] = [
        ("the device is broken", 1, StorageWriter(folder, "failing"), FailingPlanner() if rank == 1 else None),
        ("injected, nothing happened", 1, StorageWriter(broken, "failing"), None),
        ("not everything that was planned has been written", 0, forgetful(folder, "failing"), None),
    ]
    for message, where, writer, planner in cases:
        with pytest.raises(CheckpointException, match=message) as caught:
            dcp.save(state, storage_writer=writer, planner=planner, checkpoint_id="5")
        assert list(caught.value.failures) == [where]


class Model(Stateful):
    """Torchtitan's ModelWrapper."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state_dict, options=StateDictOptions(strict=False))


class Optimizers(Stateful):
    """Torchtitan's OptimizersContainer."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        return flat_optimizer_state(self.model, self.optim)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optim, state_dict, options=options)


class Progress(Stateful):
    """Torchtitan's TrainState."""

    def __init__(self) -> None:
        self.step, self.losses = 0, [float("nan")]

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.losses = int(state_dict["step"]), state_dict["losses"]


class Data(Stateful):
    """Torchtitan's ParallelAwareDataloader: each rank under a key of its own."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        seed_all(10 * seed + rank)
        with warnings.catch_warnings(action="ignore"):  # torchdata calls what torch has deprecated
            numbers: Any = list(range(100))
            self.loader: Any = StatefulDataLoader(numbers, batch_size=2, shuffle=True)
        self.batches = iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return {f"dp_rank_{self.rank}": self.loader.state_dict(), "world_size": 2}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loader.load_state_dict(state_dict[f"dp_rank_{self.rank}"])
        self.batches = iter(self.loader)


def titan(folder: str, rank: int) -> None:
    """The objects that torchtitan saves, as it saves them, into objects with other values."""
    states: list[dict[str, Any]] = []
    for seed in (1, 2):
        model, optim = sharded(seed)
        scheduler = LambdaLR(optim, lambda step: 1 / (step + 1))
        state = {
            "model": Model(model), "optimizer": Optimizers(model, optim), "lr_scheduler": scheduler,
            "train_state": Progress(), "dataloader": Data(rank, seed),
        }  # fmt: skip
        states.append(state)
    saved, loaded = states
    for _ in range(3):
        next(saved["dataloader"].batches)
        saved["optimizer"].optim.step()
        saved["lr_scheduler"].step()
    saved["train_state"].step, saved["train_state"].losses = 3, [1.5, float("inf")]
    dcp.save(saved, storage_writer=StorageWriter(folder, run="titan"), checkpoint_id="outputs/checkpoint/step-3")
    # As torchtitan does: without a batch drawn first, the loader has no state to load into.
    next(loaded["dataloader"].batches)
    dcp.load(loaded, storage_reader=StorageReader(folder, run="titan"), checkpoint_id="outputs/checkpoint/step-3")
    for name in ("model", "optimizer", "lr_scheduler", "train_state"):
        assert same(full(loaded[name].state_dict()), full(saved[name].state_dict())), name
    rest = [torch.stack(list(state["dataloader"].batches)) for state in states]
    assert torch.equal(*rest)


def cached_plans(folder: str, rank: int) -> None:
    """A planner that sends its plan only once: later saves do not land in the attempt of the first."""
    writer = StorageWriter(folder, run="cached")
    for step in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"x": torch.full((3,), step)}, storage_writer=writer, planner=planner, checkpoint_id=str(step))
    for step in (1, 2, 3):
        state = {"x": torch.zeros(3, dtype=torch.int64)}
        dcp.load(state, storage_reader=StorageReader(folder, run="cached", checkpoint=step))
        assert state["x"].tolist() == [step] * 3
    planner, fresh = DefaultSavePlanner(enable_plan_caching=True), StorageWriter(folder, run="cached")
    with pytest.raises(CheckpointException, match="Use one StorageWriter for all saves"):
        dcp.save({"x": torch.full((3,), 4)}, storage_writer=fresh, planner=planner, checkpoint_id="4")


class LateReader(StorageReader):
    """Finds the latest checkpoint only after rank 0 has, and after a newer one was committed."""

    meeting: Path

    def read_metadata(self, *args: Any, **ignored: Any) -> Any:
        if dist.get_rank() == 0:
            metadata = super().read_metadata()
            self.meeting.touch()
            return metadata
        wait_until(self.meeting.exists)
        newer = {"x": torch.full((3,), 2.0)}
        with warnings.catch_warnings(action="ignore"):
            dcp.save(newer, storage_writer=StorageWriter(sys.argv[1], run="moving", step=2), no_dist=True)
        return super().read_metadata()


def moving_latest(folder: str, rank: int) -> None:
    """A checkpoint that is committed while ranks look for the latest: all read the coordinator's."""
    dcp.save({"x": torch.full((3,), 1.0)}, storage_writer=StorageWriter(folder, run="moving", step=1))
    reader = LateReader(folder, run="moving")
    reader.meeting = Path(folder) / "moving" / "rank-0-has-found-it"
    state = {"x": torch.zeros(3)}
    dcp.load(state, storage_reader=reader)
    assert state["x"].tolist() == [1.0] * 3
    dcp.load(state, storage_reader=StorageReader(folder, run="moving"))
    assert state["x"].tolist() == [2.0] * 3


class DyingPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def die(folder: str, rank: int) -> None:
    planner = DyingPlanner() if rank == 1 else None
    try:
        dcp.save(state_of(*sharded(1)), storage_writer=StorageWriter(folder, "killed", 1), planner=planner)
    except Exception as error:
        print(f"rank 0 failed: {type(error).__name__}", flush=True)
        os._exit(3)


SCENARIOS = (round_trip, from_single, resharded, failures, titan, cached_plans, moving_latest)


def main() -> None:
    folder, names = sys.argv[1], sys.argv[2:]
    rank = join()
    for scenario in [die] if names == ["die"] else SCENARIOS:
        scenario(folder, rank)
        print(f"{scenario.__name__} held", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
