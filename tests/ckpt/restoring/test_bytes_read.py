from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt import Checkpointer
from ckptstore.format import boxes
from ckptstore.format.boxes import Box, Want
from ckptstore.format.columns import column
from ckptstore.format.documents import Content, Entries, Shard, Slices
from ckptstore.format.planning import plan_reads
from ckptstore.format.shards import EncodedChunk, Slice, chunk_table, place_slices, plan_chunks
from ckptstore.names import shard_name
from ckptstore.reading.source import StoreSource
from tests.support.parallel.runner import Scenario, run_scenario
from tests.support.stores import CountingStore

_MOST = 1.05
_READERS = 8
Shapes = dict[str, tuple[int, ...]]


def transformer(width: int, layers: int, vocabulary: int) -> Shapes:
    """Parameters and both moments of an ordinary one."""
    found: Shapes = {"tok.weight": (vocabulary, width), "head.weight": (vocabulary, width), "norm.weight": (width,)}
    for layer in range(layers):
        block = f"blocks.{layer}."
        found |= {f"{block}attn.{name}.weight": (width, width) for name in "qkvo"}
        found |= {f"{block}up.weight": (4 * width, width), f"{block}up.bias": (4 * width,)}
        found |= {f"{block}down.weight": (width, 4 * width), f"{block}down.bias": (width,)}
        found |= {f"{block}norm{number}.{kind}": (width,) for number in (1, 2) for kind in ("weight", "bias")}
    kinds = ("model/{}", "optim/state/{}/exp_avg", "optim/state/{}/exp_avg_sq")
    return {kind.format(name): shape for kind in kinds for name, shape in found.items()}


def part(shape: Sequence[int], rank: int, ranks: int) -> Box:
    """What fully_shard gives a rank."""
    step = -(-shape[0] // ranks)
    start = min(rank * step, shape[0])
    return (start, *(0 for _ in shape[1:]), min(step, shape[0] - start), *shape[1:])


def saved(shapes: Shapes, ranks: int) -> Content:
    """The manifest's content as the product lays it out; stored bytes are raw ones."""
    index = {name: number for number, name in enumerate(shapes)}
    shards, rows = [], []
    for rank in range(ranks):
        mine = [Slice(name, "float32", shape, part(shape, rank, ranks)) for name, shape in shapes.items()]
        placed = place_slices(piece for piece in mine if piece.bytes)
        rows += [(index[p.slice.entry], rank, p.at, p.slice.box) for p in placed]
        chunks = [EncodedChunk(b"", span.bytes, span.bytes, "raw", "00" * 16) for span in plan_chunks(placed)]
        shards.append(Shard(name=shard_name(rank), rank=rank, chunks=chunk_table(chunks)))
    slices = Slices(
        entry=column(row[0] for row in rows), shard=column(row[1] for row in rows), at=column(row[2] for row in rows),
        box=column(number for row in rows for number in row[3]),
    )  # fmt: skip
    entries = Entries(name=list(shapes), dtype=["float32"] * len(shapes), shape=[list(s) for s in shapes.values()])
    return Content(shards=shards, entries=entries, slices=slices, aliases={}, trees={})


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("width", "vocabulary"), [(512, 4000), (768, 4001), (1024, 5025)])
def test_one_rank_of_eight_reads_its_slice(width: int, vocabulary: int, ranks: int) -> None:
    shapes = transformer(width, layers=2, vocabulary=vocabulary)
    content = saved(shapes, ranks)
    for rank in range(_READERS):
        wanted = {name: part(shape, rank, _READERS) for name, shape in shapes.items()}
        reads = plan_reads(content, [Want(name, box, name) for name, box in wanted.items()])
        needed = sum(4 * prod(boxes.sizes(box)) for box in wanted.values())
        assert sum(read.bytes for read in reads) <= _MOST * needed


@pytest.mark.parametrize("replica_reads", ["none", "broadcast"])
def test_sharded_ranks_read_their_slices(tmp_path: Path, replica_reads: str) -> None:
    with Checkpointer(str(tmp_path / "store"), run=RUN, writer="thread", compress="off") as checkpointer:
        checkpointer.save(model(seed=3), None, 1)
    arguments = {"store": str(tmp_path / "store"), "seed": 3, "replica_reads": replica_reads}
    scenario = Scenario(f"{__name__}:restore", 4, arguments)
    results = run_scenario(scenario, tmp_path / "ranks")
    for result in results:
        assert result["equal"]
        assert replica_reads == "broadcast" or result["read"] <= _MOST * result["held"]
    assert sum(result["read"] for result in results) <= _MOST * sum(result["held"] for result in results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 55 MB by one process, as the bytes are."""
    folder = tmp_path_factory.mktemp("bytes")
    torch.manual_seed(0)
    tensors = {
        name.removeprefix("model/").replace(".", "_"): nn.Parameter(torch.randn(shape))
        for name, shape in transformer(768, layers=1, vocabulary=4000).items()
        if name.startswith("model/")
    }
    with Checkpointer(str(folder), run="r", writer="thread", compress="off") as checkpointer:
        checkpointer.save(nn.ParameterDict(tensors), None, 1)
    return folder


@pytest.mark.parametrize("name", ["tok_weight", "blocks_0_up_weight", "blocks_0_attn_q_weight"])
def test_one_tensor_by_name_reads_its_bytes(folder: Path, name: str) -> None:
    with Checkpointer(str(folder), run="r", writer="thread") as checkpointer:
        source = checkpointer._source
        assert isinstance(source, StoreSource)
        source.store = counting = CountingStore(source.store)
        tensor = checkpointer.load(names=f"model/{name}")[f"model/{name}"]
    assert np.isfinite(tensor.numpy()).all()
    assert counting.read_bytes <= _MOST * tensor.nbytes


RUN = "sharded"


def model(seed: int) -> nn.Module:
    """13 MB, 768 wide; the last layer divides by no number of ranks."""
    torch.manual_seed(seed)
    layers = [nn.Linear(768, 768, bias=False) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(768, 1001, bias=False))


def restore(store: str, seed: int, replica_reads: Any) -> dict[str, Any]:
    """Bytes of shards that this rank read, the bytes it holds, and whether they are those of the seed."""
    expected, sharded = model(seed).state_dict(), model(seed + 1)
    fully_shard(sharded)
    with Checkpointer(store, run=RUN, writer="thread", replica_reads=replica_reads) as checkpointer:
        source = checkpointer._source
        assert isinstance(source, StoreSource)
        source.store = counting = CountingStore(source.store)
        checkpointer.restore(sharded)
    held, equal = 0, True
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        held += parameter.to_local().nbytes
        equal &= torch.equal(parameter.full_tensor(), expected[name])
    return {"read": counting.read_bytes, "held": held, "equal": equal}
