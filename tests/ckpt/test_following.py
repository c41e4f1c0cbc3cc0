from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt
from ckpt import Checkpointer
from ckptstore.errors import CheckpointHeld, CorruptObject, ObjectMissing, StateMismatch
from ckptstore.names import RunKeys
from ckptstore.operator import StoreOperator
from ckptstore.stores import open_store
from tests.support.checkpoints import Arrays, flip, steps, write_checkpoint
from tests.support.parallel.runner import Scenario, run_scenario


def arrays(seed: int, **changed: int) -> Arrays:
    """Weights of `made`, too large for a chunk to be shared."""
    return {
        f"model/{name}": np.random.default_rng(changed.get(name[0], seed)).standard_normal(shape).astype(np.float32)
        for name, shape in (("0.weight", (200, 300)), ("0.bias", (200,)), ("1.weight", (100, 200)), ("1.bias", (100,)))
    }


def made(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 100)).to(dtype)


def holds(model: nn.Module, expected: Arrays) -> bool:
    state = model.state_dict()
    return all(torch.equal(v, torch.from_numpy(expected[f"model/{n}"]).to(v.dtype)) for n, v in state.items())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CKPT_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_each_turn_of_the_loop_has_the_newest_weights_and_loads_what_changed(folder: Path) -> None:
    store, model, half = open_store(str(folder)), made(), made(torch.bfloat16)
    write_checkpoint(store, "gpt", 1, arrays(1))
    follower = ckpt.follow("gpt", dtype="bf16")
    assert (next(follower).load_into(half), holds(half, arrays(1))) == (4, True)
    write_checkpoint(store, "gpt", 2, arrays(9))
    write_checkpoint(store, "gpt", 3, arrays(1, **{"1": 3}))
    weights = next(follower)
    assert (weights.checkpoint.step, weights.load_into(half), holds(half, arrays(1, **{"1": 3}))) == (3, 2, True)
    assert (weights.load_into(half), weights.load_into(model)) == (0, 4), "another model has nothing yet"
    with pytest.raises(CheckpointHeld, match="lease:"):
        StoreOperator(store).delete(weights.checkpoint, 0, force=True)
    later = threading.Timer(0.1, write_checkpoint, (store, "gpt", 4, arrays(4)))
    later.start()
    assert (next(follower).checkpoint.step, steps(store, "gpt")) == (4, [4, 3, 2, 1])
    later.join()
    StoreOperator(store).delete(weights.checkpoint, 0)
    follower.close()


def test_after_an_error_a_model_has_its_old_weights(folder: Path) -> None:
    store, model = open_store(str(folder)), made()
    write_checkpoint(store, "gpt", 1, arrays(1))
    follower = ckpt.follow("gpt")
    next(follower).load_into(model)
    damaged = write_checkpoint(store, "gpt", 2, arrays(2))
    flip(folder / RunKeys("gpt").shard(damaged.attempt, "shard-00000.ckpt"), -1)
    weights = next(follower)
    with pytest.raises(CorruptObject):
        weights.load_into(model)
    assert holds(model, arrays(1))
    other = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 7))
    with pytest.raises(StateMismatch, match=r"2 tensors of gpt@2.* do not fit .*1.bias: \(100,\), here \(7,\)"):
        weights.load_into(other)
    write_checkpoint(store, "gpt", 3, arrays(3))
    assert (next(follower).load_into(model), holds(model, arrays(3))) == (4, True)
    (folder / RunKeys("gpt").manifest(write_checkpoint(store, "gpt", 4, arrays(4)).attempt)).unlink()
    with pytest.raises(ObjectMissing):
        next(follower)


def follow_under_fsdp2(store: str) -> list[bool]:
    """A sharded model follows what a sharded model saves."""
    found = []
    with Checkpointer(store, run="gpt", writer="thread") as checkpointer:
        for step in (1, 2):
            torch.manual_seed(step)
            trained, reader = made(), made(torch.bfloat16)
            whole = {name: value.clone() for name, value in trained.state_dict().items()}
            for one in (trained, reader):
                fully_shard(one, mesh=init_device_mesh("cpu", (2,)))
            checkpointer.save(trained, None, step)
            with_url = ckpt.follow("gpt")
            next(with_url).load_into(reader)
            with_url.close()
            for name, value in reader.state_dict().items():
                assert isinstance(value, DTensor)
                found.append(torch.equal(value.full_tensor(), whole[name].to(torch.bfloat16)))
    return found


def test_ranks_read_their_own_parts(folder: Path, tmp_path: Path) -> None:
    scenario = Scenario(f"{__name__}:follow_under_fsdp2", 2, {"store": str(folder)})
    assert run_scenario(scenario, tmp_path / "scenario") == [[True] * 8] * 2
