"""What we use of torch beyond its public interfaces does what we think. A new torch that changes it fails here."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import ckpt
from tests.support.parallel.runner import Outcome, Scenario, run_named
from tests.support.parallel.zero import ZeroRedundancyOptimizer

_PINS = ("dtensor", "fsdp2", "fsdp1", "zero", "store_and_exchange", "store_and_exchange over tcp")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    scenarios = {name: Scenario(f"{__name__}:{name.split()[0]}", 2, tcp=name.endswith("tcp")) for name in _PINS}
    return run_named(scenarios, tmp_path_factory.mktemp("pins"))


@pytest.mark.parametrize("pin", _PINS)
def test_pinned(outcomes: dict[str, Outcome], pin: str) -> None:
    for result in outcomes[pin].result():
        assert result
        assert [what for what, holds in result.items() if not holds] == []


def test_every_name_of_torch_is_in_the_oldest_one_that_is_promised() -> None:
    """torch_2_6.txt has the names that resolve there; `make oldest` runs it. Fields of objects that it lacks are
    `pci_bus_id` (test_device.py) and `_fsdp_param_groups` (test_modules.py)."""
    known = set(Path(__file__).with_name("torch_2_6.txt").read_text().split())
    used = set(chain.from_iterable(map(_names_of_torch, Path(ckpt.__file__).parent.rglob("*.py"))))
    assert used - known == set(), "look in torch 2.6, and then add them to the list"


def _names_of_torch(path: Path) -> Iterator[str]:
    """Dotted names, as torch.cuda.Stream, of what a file imports from torch and uses of it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name[:5] == "torch"}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            if first in names and re.fullmatch(r"[\w.]*", rest):
                yield names[first] + dot + rest


def dtensor() -> dict[str, bool]:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    local = torch.full((2 - rank, 3), float(rank))
    tensor = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=torch.Size((3, 3)), stride=(3, 1))
    whole = tensor.full_tensor()
    tensor.to_local()[...] = 7.0
    return {
        "from_local takes uneven parts": torch.equal(whole, torch.tensor([[0.0] * 3, [0.0] * 3, [1.0] * 3])),
        "to_local is the memory itself": bool((local == 7).all()),
        "mesh and placements are told": tensor.device_mesh.mesh.tolist() == [0, 1] and tensor.placements == (Shard(0),),
        "the mesh tells the own coordinate": list(mesh.get_coordinate() or []) == [rank] and mesh.size(0) == 2,
        "a strided shard tells its factor": _StridedShard(1, split_factor=2).split_factor == 2
        and _StridedShard(1, split_factor=2).dim == 1,
    }


def fsdp2() -> dict[str, bool]:
    """Two ranks: a forward leaves the root's parameters gathered, and reshard() takes them back."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    known = torch.optim.SGD(model.parameters()).param_groups[0]["params"][0]
    with torch.no_grad():
        model(torch.zeros(1, 4))
    gathered = model.get_parameter("0.weight")
    assert isinstance(model, FSDPModule)
    model.reshard()
    return {
        "gathered after a forward": not isinstance(gathered, DTensor),
        "sharded after reshard": isinstance(model.get_parameter("0.weight"), DTensor),
        "and the optimizer's own": model.get_parameter("0.weight") is known,
    }


def fsdp1() -> dict[str, bool]:
    """Two ranks: where the parts of a flattened parameter lie."""
    found = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        inner = nn.Linear(5, 3)
        values = torch.cat([parameter.detach().flatten() for parameter in inner.parameters()])
        dist.broadcast(values, 0)
        nn.utils.vector_to_parameters(values, inner.parameters())
        expected = [parameter.detach().clone() for parameter in inner.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NO_SHARD is deprecated
            model = FullyShardedDataParallel(
                inner, device_id=torch.device("cpu"), use_orig_params=True, sharding_strategy=strategy
            )
        handle: Any = model._handle
        name = strategy.name
        found[f"{name}: sharded or not"] = handle.uses_sharded_strategy == (strategy != ShardingStrategy.NO_SHARD)
        if not handle.uses_sharded_strategy:
            continue
        flat, ranks = handle.flat_param, dist.get_process_group_ranks(handle.process_group)
        found[f"{name}: names and group"] = flat._fqns == ["weight", "bias"] and ranks == [0, 1]
        parts = zip(flat._params, flat._shapes, flat._shard_param_infos, expected, strict=True)
        for parameter, shape, info, whole in parts:
            start, stop = (info.intra_param_start_idx, info.intra_param_end_idx + 1) if info.in_shard else (0, 0)
            same = torch.equal(parameter.detach(), whole.flatten()[start:stop]) and tuple(shape) == tuple(whole.shape)
            at = info.offset_in_shard if info.in_shard else 0
            local = flat.detach()[at : at + stop - start]
            found[f"{name}: {tuple(shape)}"] = same and torch.equal(local, parameter)
    return found


def zero() -> dict[str, bool]:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    owners = {parameter: optimizer._param_to_rank[parameter] for parameter in model.parameters()}
    mine = {parameter for parameter, rank in owners.items() if rank == optimizer.rank}
    return {
        "both ranks own some": set(owners.values()) == {0, 1},
        "the inner optimizer keeps the state": set(optimizer.optim.state) == mine,
        "the outer one has all parameters": optimizer.param_groups[0]["params"] == list(model.parameters()),
    }


def store_and_exchange() -> dict[str, bool]:
    """Two ranks: the store of the process group, and an exchange of uneven parts over gloo."""
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    missing = store.check([f"pin/{rank}"])
    store.set(f"pin/{rank}", b"\x00\xff")  # type: ignore[arg-type]
    there, value = store.check([f"pin/{rank}"]), bytes(store.get(f"pin/{rank}"))
    store.delete_key(f"pin/{rank}")
    received = torch.empty(3 if rank == 0 else 0, dtype=torch.uint8)
    sent = torch.tensor([] if rank == 0 else [1, 2, 3], dtype=torch.uint8)
    dist.all_to_all_single(
        received, sent, [0, 3] if rank == 0 else [0, 0], [0, 0] if rank == 0 else [3, 0], group=dist.new_group()
    )
    return {
        "check does not wait": not missing,
        "set, check, get, delete": there and value == b"\x00\xff" and not store.check([f"pin/{rank}"]),
        "the same store each time": store is distributed_c10d._get_default_store(),
        "uneven exchange": received.tolist() == ([1, 2, 3] if rank == 0 else []),
    }
