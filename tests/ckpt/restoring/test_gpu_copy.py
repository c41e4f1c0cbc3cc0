"""Restores to memory that is reached by lanes: through a few buffers, by copies that end as late as they may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt import Checkpointer
from ckpt.capture.parts import TensorPart, TensorPiece
from ckpt.restoring.destinations import Destinations
from ckptstore.errors import RestoreFailed
from ckptstore.format.planning import plan_reads
from ckptstore.names import Reference
from ckptstore.reading.fetch import fetch
from ckptstore.reading.source import StoreSource, read_manifest
from ckptstore.stores import open_store
from tests.ckpt.restoring.lanes import lazy_lanes
from tests.support.training import same_state


class Odd(nn.Module):
    """Tensors that do not lie in order, of several types, tied, empty, without dimensions, and many that are small."""

    steps: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.plain = nn.Linear(192, 193)
        self.across = nn.Linear(192, 160)
        self.across.weight.data = self.across.weight.data.t().contiguous().t()
        self.image: Any = nn.Conv2d(32, 40, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.tied = nn.Linear(192, 193)
        self.tied.weight = self.plain.weight
        self.small = nn.ParameterList(nn.Parameter(torch.randn(count)) for count in range(1, 40))
        self.weights16 = nn.Parameter(torch.randn(300, 70).bfloat16())
        self.spectrum = nn.Parameter(torch.randn(90, 50, dtype=torch.complex64))
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("nothing", torch.empty(0, 3))


def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    model = Odd(seed)
    optim = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optim.step()
    return model, optim


@pytest.fixture(scope="module", params=["off", "fast"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """A store with checkpoints of two steps, and the state of the second."""
    store = str(tmp_path_factory.mktemp(request.param))
    with Checkpointer(store, run="r", writer="thread", compress=request.param, incremental=False) as checkpointer:
        checkpointer.save(*make(1), 1)
        model, optim = make(2)
        checkpointer.save(model, optim, 2)
    return store, (model.state_dict(), optim.state_dict())


def restore(store: str, seed: int = 0) -> tuple[Any, Any]:
    model, optim = make(seed)
    with Checkpointer(store, run="r", writer="thread") as checkpointer:
        checkpointer.restore(model, optim)
    return model.state_dict(), optim.state_dict()


def test_all_bits_arrive_through_a_few_small_buffers(saved: tuple[str, Any]) -> None:
    store, state = saved
    with lazy_lanes() as lanes:
        assert same_state(restore(store), state)
    (lane,) = lanes
    assert lane.ends == 1
    largest = max(parameter.nbytes for parameter in Odd(0).parameters())
    assert 1 <= len(lane.staged) <= 3
    assert max(lane.staged) < 2 * largest


def test_types_are_cast_and_what_differs_in_shape_is_left_alone(saved: tuple[str, Any]) -> None:
    store, (weights, _) = saved
    model = Odd(0).double()
    model.small = nn.ParameterList(nn.Parameter(torch.full((50,), 7.0)) for _ in range(39))
    with lazy_lanes(), Checkpointer(store, run="r", writer="thread") as checkpointer:
        assert checkpointer.restore(model, None, strict=False) is not None
    found = model.state_dict()
    for name, value in weights.items():
        if name.startswith("small"):
            assert found[name].eq(7).all()
        else:
            assert torch.equal(found[name], value.to(found[name].dtype)), name


def test_slices_arrive_wherever_they_live(saved: tuple[str, Any]) -> None:
    store, (weights, _) = saved
    source = StoreSource(open_store(store))
    checkpoint = source.find(Reference("r", 2))
    content = read_manifest(source, checkpoint).content
    name, whole = "model/across.weight", weights["across.weight"]
    with lazy_lanes() as lanes:
        destinations = Destinations(content)
        columns = torch.zeros(160, 100)  # of a larger tensor
        turned = torch.zeros(80, 64).t()
        again = torch.zeros(64, 80, dtype=torch.float64)
        pieces = [
            TensorPiece((0, 3, 160, 50), columns[:, 50:]),
            TensorPiece((96, 100, 64, 80), turned),
            TensorPiece((96, 100, 64, 80), again),
        ]
        destinations.fill(name, TensorPart((160, 192), torch.float32, tuple(pieces)))
        destinations.allocate()
        reads = plan_reads(content, destinations.wants())
        with destinations.receiving(reads) as buffers:
            fetch(source, checkpoint, reads, buffers)
        destinations.place()
    assert len(lanes) == 1
    assert torch.equal(columns, torch.cat([torch.zeros(160, 50), whole[:, 3:53]], 1))
    assert torch.equal(turned, whole[96:, 100:180])
    assert torch.equal(again, whole[96:, 100:180].double())


def test_a_damaged_checkpoint_gives_way_to_the_one_before(saved: tuple[str, Any], tmp_path: Path) -> None:
    store, _ = saved
    copy = open_store(str(tmp_path))
    for info in open_store(store).list(""):
        copy.put(info.key, open_store(store).get(info.key))
    checkpoint = StoreSource(copy).find(Reference("r", 2))
    (shard,) = Path(tmp_path).rglob(f"{checkpoint.attempt}/*.ckpt")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    first, optim = make(1)
    with lazy_lanes() as lanes:
        assert same_state(restore(str(tmp_path)), (first.state_dict(), optim.state_dict()))
    assert [lane.ends for lane in lanes] == [1, 1]


def test_a_device_that_fails_fails_the_restore(saved: tuple[str, Any]) -> None:
    with lazy_lanes(failing=RuntimeError("an illegal access")), pytest.raises(RestoreFailed, match="illegal access"):
        restore(saved[0])
